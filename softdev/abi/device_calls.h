/* Calls of a device that are not verbs, for this project only. Must not contain preprocessor
 * directives, because cffi reads it.
 *
 * Each entry is optional: it is NULL if the device lacks it, and the caller does without. The
 * system's libraries have only `provider_calls`, and the embedded device has all others.
 */
/* The medium that carries the bytes of a queue pair. */
enum aiordma_wire {
	AIORDMA_WIRE_NONE, /* not connected yet, or not any more */
	AIORDMA_WIRE_SHARED_MEMORY,
	AIORDMA_WIRE_TCP,
	AIORDMA_WIRE_ROCE /* standard RoCE v2 packets */
};

/* The number of faults injected in this process so far, by kind. */
struct aiordma_fault_counts {
	uint64_t lost;
	uint64_t duplicated;
	uint64_t delayed;
	uint64_t cut;
	uint64_t not_ready;
	uint64_t overruns;
	uint64_t registrations;
	uint64_t handshakes;
	uint64_t retried; /* retransmissions caused by the faults */
	uint64_t chances; /* occurrences that a fault might have struck, by its probability */
};

/* Bytes of the peer's completed operations on this side's memory. Each operation counts once, even
 * if the peer repeats its request. Atomics do not count. */
struct aiordma_served {
	uint64_t bytes_read;
	uint64_t bytes_written;
};

struct aiordma_device_calls {
	/* Returns a counter that grows whenever an application thread has done work of the device,
	 * and with each part of a message that has been moved while more of the message follows. */
	unsigned (*progress)(void);

	/* Called when a thread starts (1) or stops (0) polling in a loop. Peers need not notify
	 * this process in between. */
	void (*busy_poll)(int starts);

	/* Called with 1 if the caller handles what it has found and will poll again soon, with -1
	 * if it will not, and with 0 to renew a 1. Peers need not notify this process in between,
	 * because the device's thread polls every half a millisecond in case the caller takes
	 * longer. */
	void (*hold_polling)(int change);

	/* Returns how often the device has written to peers: in the upper half to peers that it had
	 * to wake, and in the lower half to peers that were polling. */
	uint64_t (*peer_wakeups)(void);

	/* Make this event channel's fd readable whenever there is work for the device, not only
	 * when there is an event. The thread that looks for an event then does the work itself
	 * instead of being woken by another thread. Other descriptors are ignored. */
	void (*wake_early)(int fd);

	/* Implements ibv_reg_mr(3) for memory that the caller knows to have no holes: private,
	 * anonymous memory with the requested rights, mapped for this purpose or taken from an
	 * allocator. The device lets its pages be created when they are used. It touches other
	 * memory immediately, like a card that pins pages. */
	struct ibv_mr *(*reg_own_mr)(struct ibv_pd *pd, void *addr, size_t length, int access);

	/* Create a region of all memory of the process, for sending from, receiving into and
	 * binding windows to any address that the caller knows to be mapped. Devices that pin pages
	 * do not have this call. */
	struct ibv_mr *(*reg_local_dma)(struct ibv_pd *pd);

	/* Returns the medium of a queue pair. A card uses one for all, which its port reports. */
	enum aiordma_wire (*wire)(struct ibv_qp *qp);

	/* End the queue pair with its peer: as soon as this side learns that the peer's process has
	 * ended or the path to it was given up, IBV_EVENT_QP_FATAL is raised and everything is
	 * flushed. Without this call, the queue pair stays in its state, as on a card, which does
	 * not watch its peers. Called before the queue pair is connected. */
	void (*end_with_peer)(struct ibv_qp *qp);

	/* Returns 1 if the host with the address `gid` also has the address `peer`, as far as this
	 * host knows: they are equal, or both are local. A device that connects to the address in a
	 * peer's endpoint has this call, so that its caller can check where the endpoint came
	 * from. */
	int (*same_host)(const uint8_t gid[16], const uint8_t peer[16]);

	/* Returns 1 if the peer has withdrawn the request of this id, as far as this side knows, so
	 * that rdma_accept(3) would fail. The kernel does not report this earlier. */
	int (*withdrawn)(struct rdma_cm_id *id);

	/* Replace the fault spec of this process, for tests. NULL removes it. Returns 0, or EINVAL
	 * with a message in `error`. */
	int (*set_faults)(const char *spec, char *error, size_t error_size);
	void (*fault_counts)(struct aiordma_fault_counts *counts);

	/* Returns why a device or an event channel could not be opened just now in this thread: an
	 * environment variable, or a system call that the kernel denies; otherwise "". */
	const char *(*start_failure)(void);

	/* Start counting the bytes that the peer reads and writes through this queue pair. Any
	 * thread may read the counters, even after the queue pair has been destroyed, until the
	 * caller passes them to `release_served`. Returns NULL if there is no memory for them. */
	const struct aiordma_served *(*count_served)(struct ibv_qp *qp);
	void (*release_served)(const struct aiordma_served *served);
	/* Exclude a region, or a window including later binds, from these counts. */
	void (*exclude_from_served)(uint32_t rkey);

	/* Returns the calls of provider libraries. Entries of libraries that are not installed are
	 * NULL. Thread-safe. */
	const struct aiordma_provider_calls *(*provider_calls)(void);
};
