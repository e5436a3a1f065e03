/* Accessors for memory that threads or processes share without a lock. Each name states the memory
 * order and what it is for. */
#pragma once

/* Hints: the value may be out of date when it is used. The reader either checks again under a lock
 * or does no harm by acting on an old value. Relaxed order. */
#define soft_hint_get(at) __atomic_load_n(at, __ATOMIC_RELAXED)
#define soft_hint_set(at, value) __atomic_store_n(at, value, __ATOMIC_RELAXED)

/* Counters that several threads update. No other memory depends on their order. The addition
 * evaluates to the new value. */
#define soft_counter_add(at, value) __atomic_add_fetch(at, value, __ATOMIC_RELAXED)
#define soft_counter_get(at) soft_hint_get(at) /* may be out of date */
/* Increment a counter whose other writers are excluded by a lock. This is cheaper than an atomic
 * addition. */
#define soft_counter_bump(at) __atomic_store_n(at, *(at) + 1, __ATOMIC_RELAXED)

/* Release and acquire: a thread that observes the value also sees everything that was written
 * before it was published. */
#define soft_publish(at, value) __atomic_store_n(at, value, __ATOMIC_RELEASE)
#define soft_observe(at) __atomic_load_n(at, __ATOMIC_ACQUIRE)
/* Decrement a counter with release order. */
#define soft_publish_less(at) __atomic_sub_fetch(at, 1, __ATOMIC_RELEASE)

/* Sequentially consistent accesses, which have one total order. Each of two sides writes its own
 * word and then reads the other side's word. At least one of them sees the other's write. */
#define soft_total_set(at, value) __atomic_store_n(at, value, __ATOMIC_SEQ_CST)
#define soft_total_get(at) __atomic_load_n(at, __ATOMIC_SEQ_CST)
#define soft_total_take(at) __atomic_exchange_n(at, 0, __ATOMIC_SEQ_CST) /* leaves 0 */
/* Order plain accesses in the same way, with a full barrier. */
#define soft_total_barrier() __sync_synchronize()
