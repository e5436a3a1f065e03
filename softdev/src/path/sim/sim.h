/* Simulated hosts (sim.c). embedded.h declares the public calls. */
#pragma once

#include "engine/engine.h"

/* Returns the next random number of the seed. */
uint64_t soft_sim_random(void);
