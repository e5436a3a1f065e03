/* Accessors for memory that threads or processes share without a lock. Each name states the purpose
 * of the access, which determines the memory order. */
#pragma once

/* Relaxed accesses for hints, which may be out of date. The reader checks the value again under a
 * lock, or acting on an old value is harmless. */
#define soft_hint_get(at) __atomic_load_n(at, __ATOMIC_RELAXED)
#define soft_hint_set(at, value) __atomic_store_n(at, value, __ATOMIC_RELAXED)

/* Relaxed accesses for counters that several threads update and that do not order other memory
 * accesses. soft_counter_add evaluates to the new value. */
#define soft_counter_add(at, value) __atomic_add_fetch(at, value, __ATOMIC_RELAXED)
#define soft_counter_get(at) soft_hint_get(at) /* may be out of date */
/* Increment a counter that is written only under a lock. This is cheaper than an atomic
 * addition. */
#define soft_counter_bump(at) __atomic_store_n(at, *(at) + 1, __ATOMIC_RELAXED)

/* Accesses with release and acquire order. A thread that observes a value also sees everything
 * written before the value was published. */
#define soft_publish(at, value) __atomic_store_n(at, value, __ATOMIC_RELEASE)
#define soft_observe(at) __atomic_load_n(at, __ATOMIC_ACQUIRE)
/* Decrement a counter with release order. */
#define soft_publish_decrement(at) __atomic_sub_fetch(at, 1, __ATOMIC_RELEASE)

/* Sequentially consistent accesses, which have a single total order. If two threads each write
 * their own word and then read the other thread's word, at least one of them reads the value that
 * the other has written. */
#define soft_total_set(at, value) __atomic_store_n(at, value, __ATOMIC_SEQ_CST)
#define soft_total_get(at) __atomic_load_n(at, __ATOMIC_SEQ_CST)
#define soft_total_take(at) __atomic_exchange_n(at, 0, __ATOMIC_SEQ_CST) /* leaves 0 */
/* Order plain accesses in the same way with a full barrier. */
#define soft_total_barrier() __sync_synchronize()
