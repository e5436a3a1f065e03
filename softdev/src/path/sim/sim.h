/* Simulated hosts (sim.c): its calls are in embedded.h. */
#pragma once

#include "engine/engine.h"

/* Of the seed. */
uint64_t soft_sim_random(void);
