/* The objects behind the verbs: what the application sees of each is its first member.
 *
 * Everything here is called with the engine's lock, and its members are under it, except where they
 * say otherwise.
 */
#pragma once

#include "address.h"
#include "completion.h"
#include "device.h"
#include "memory.h"
#include "queue_pair.h"
#include "upper.h"
#include "xrc.h"
