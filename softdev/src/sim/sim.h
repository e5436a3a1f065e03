/* Internal interface of the simulated hosts (sim.c). embedded.h declares the public functions. */
#pragma once

#include "engine/engine.h"

/* Return the next number of the pseudo-random sequence. */
uint64_t soft_sim_random(void);
