/* Verbs objects. The first member of each struct is the part that the application sees.
 *
 * Unless stated otherwise, the engine's lock protects all members, and callers of all functions
 * must hold it.
 */
#pragma once

#include "address.h"
#include "completion.h"
#include "device.h"
#include "memory.h"
#include "queue_pair.h"
#include "upper.h"
#include "xrc.h"
