/* The ABI for the compiler: the system types it stands on, then the two files that cffi reads too. */
#ifndef AIORDMA_ABI_H
#define AIORDMA_ABI_H

#include <netinet/in.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <time.h>

#include "verbs.h"

#include "rdma_cma.h"

#include "efadv.h"
#include "mlx5dv.h"

#endif
