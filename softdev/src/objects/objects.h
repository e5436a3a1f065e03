/* The objects of the verbs. The first member of each struct is what the application sees.
 *
 * All functions require the engine's lock, which protects all members, unless stated otherwise.
 */
#pragma once

#include "address.h"
#include "completion.h"
#include "device.h"
#include "memory.h"
#include "queue_pair.h"
#include "upper.h"
#include "xrc.h"
