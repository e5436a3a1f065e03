"""The functions of the software device that are not in its table of calls.

No other module of the library uses softdev/ directly. softdev/src/embedded.h describes each
function and constant.
"""

from __future__ import annotations

from aiordma._native._lib import lib

calls = lib.aiordma_embedded_calls
raise_on = lib.aiordma_embedded_raise_on
sim_begin = lib.aiordma_sim_begin
sim_boot = lib.aiordma_sim_boot
sim_end = lib.aiordma_sim_end
sim_enter = lib.aiordma_sim_enter
sim_look = lib.aiordma_sim_look
sim_next = lib.aiordma_sim_next
sim_note = lib.aiordma_sim_note
sim_now = lib.aiordma_sim_now
sim_pass = lib.aiordma_sim_pass
sim_program = lib.aiordma_sim_program
sim_run = lib.aiordma_sim_run
sim_set_state = lib.aiordma_sim_set_state
sim_trace = lib.aiordma_sim_trace
sim_way = lib.aiordma_sim_way
trace_start = lib.aiordma_trace_start
trace_stop = lib.aiordma_trace_stop
SIM_DEAD = lib.AIORDMA_SIM_DEAD
SIM_HOSTS = lib.AIORDMA_SIM_HOSTS
SIM_NETWORKS = lib.AIORDMA_SIM_NETWORKS
SIM_STOPPED = lib.AIORDMA_SIM_STOPPED
SIM_UP = lib.AIORDMA_SIM_UP
