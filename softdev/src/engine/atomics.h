/* Memory that threads or processes share without a lock: each helper names an order and its reason.
 */
#pragma once

/* A hint: a value that may be out of date when it is used.  The reader checks under a lock, or does
 * no harm by acting on an old value.  No order. */
#define soft_hint_get(at) __atomic_load_n(at, __ATOMIC_RELAXED)
#define soft_hint_set(at, value) __atomic_store_n(at, value, __ATOMIC_RELAXED)

/* A counter that several threads add to; nothing else depends on its value's order.  The new value.
 */
#define soft_counter_add(at, value) __atomic_add_fetch(at, value, __ATOMIC_RELAXED)
#define soft_counter_get(at) soft_hint_get(at) /* may be out of date as well */
/* The same where a lock keeps other writers out: cheaper than an atomic addition. */
#define soft_counter_bump(at) __atomic_store_n(at, *(at) + 1, __ATOMIC_RELAXED)

/* Release and acquire: a thread that observes the value also sees what was written before it was
 * published. */
#define soft_publish(at, value) __atomic_store_n(at, value, __ATOMIC_RELEASE)
#define soft_observe(at) __atomic_load_n(at, __ATOMIC_ACQUIRE)
/* One less of a counter, likewise published. */
#define soft_publish_less(at) __atomic_sub_fetch(at, 1, __ATOMIC_RELEASE)

/* One total order of all of these (sequentially consistent): each of two sides writes its own word
 * and then reads the other's, and at least one of them sees what the other wrote. */
#define soft_total_set(at, value) __atomic_store_n(at, value, __ATOMIC_SEQ_CST)
#define soft_total_get(at) __atomic_load_n(at, __ATOMIC_SEQ_CST)
#define soft_total_take(at) __atomic_exchange_n(at, 0, __ATOMIC_SEQ_CST) /* and leave 0 */
/* The same order between plain accesses, as a full barrier. */
#define soft_total_barrier() __sync_synchronize()
