/* The calls of a device for this project beside the verbs; no preprocessor here, cffi reads it too.
 *
 * Each entry is optional: NULL where the device behind a table of calls does not have it, and its
 * caller then goes on without.  The system's libraries have `provider_calls` alone, the embedded
 * device has all others. */
/* The medium of the bytes of a queue pair. */
enum aiordma_wire {
	AIORDMA_WIRE_NONE, /* nothing yet, or no more */
	AIORDMA_WIRE_SHARED_MEMORY,
	AIORDMA_WIRE_TCP,
	AIORDMA_WIRE_ROCE /* packets of the specification */
};

/* Counts of the faults injected in this process so far. */
struct aiordma_fault_counts {
	uint64_t lost;
	uint64_t duplicated;
	uint64_t delayed;
	uint64_t cut;
	uint64_t not_ready;
	uint64_t overruns;
	uint64_t registrations;
	uint64_t handshakes;
	uint64_t retried; /* and what followed: how often a requester went back */
	uint64_t chances; /* what there was that one might have struck, by its probability */
};

/* Bytes of the peer's operations on this side's memory that a queue pair has completed.  Each operation
 * counts once, also if the peer has to repeat its request; atomics do not count. */
struct aiordma_served {
	uint64_t bytes_read;
	uint64_t bytes_written;
};

struct aiordma_device_calls {
	/* Grows whenever a thread of the application has done work of the device, and with each part
	 * of a message that was moved while more of the same message was to follow. */
	unsigned (*progress)(void);

	/* A thread starts (1) or stops (0) polling in a loop; in pairs.  Meanwhile peers need not
	 * notify this process. */
	void (*busy_poll)(int starts);

	/* 1: the caller handles what it has found and will poll again soon; -1: it will not; 0 renews
	 * a 1.  Meanwhile peers need not notify this process: the device's thread polls every half a
	 * millisecond, in case that it takes longer. */
	void (*hold_polling)(int change);

	/* How often the device has written to peers: in the upper half to those that it had to wake
	 * up, in the lower half to those that were polling. */
	uint64_t (*peer_wakeups)(void);

	/* Makes this event channel's fd readable as soon as there is work for the device, not only when
	 * there is an event: the thread that then looks for one does the work itself, which saves
	 * waking it by another thread.  Other descriptors are left alone. */
	void (*wake_early)(int fd);

	/* ibv_reg_mr(3) of memory that the caller knows to have no holes: private, anonymous, mapped
	 * for this or from an allocator, with the rights that are asked for.  The device leaves its
	 * pages to come when they are used; other memory it touches at once, as a card that pins. */
	struct ibv_mr *(*reg_own_mr)(struct ibv_pd *pd, void *addr, size_t length, int access);

	/* A region of all memory of the process, for sending from, receiving into, and binding
	 * windows to, wherever the caller knows that there is some.  Devices that pin pages do not have it. */
	struct ibv_mr *(*reg_local_dma)(struct ibv_pd *pd);

	/* The wire of a queue pair.  A card has one for all, which its port tells. */
	enum aiordma_wire (*wire)(struct ibv_qp *qp);

	/* The queue pair ends with its peer: when the peer's process ends, or the path to it is given
	 * up, IBV_EVENT_QP_FATAL is raised and everything is flushed, as soon as this side learns of
	 * it.  Without this call it stays as it is, as on a card, which does not watch its peers.
	 * Before it is connected. */
	void (*end_with_peer)(struct ibv_qp *qp);

	/* 1: the host that has the address `gid` has the address `peer` as well, as far as this one
	 * knows: they are equal, or both are this host's own.  A device that connects to the address
	 * in a peer's endpoint has this, for its caller to check where the endpoint came from. */
	int (*same_host)(const uint8_t gid[16], const uint8_t peer[16]);

	/* 1: the id is of a request that the peer has given up, as far as this side has heard:
	 * rdma_accept(3) would fail.  The kernel does not tell before that. */
	int (*withdrawn)(struct rdma_cm_id *id);

	/* Fault injection, for tests: replaces the fault spec of this process, NULL for none.  0, or
	 * EINVAL with what is wrong in `error`. */
	int (*set_faults)(const char *spec, char *error, size_t error_size);
	void (*fault_counts)(struct aiordma_fault_counts *counts);

	/* The reason for which a device or an event channel could not be opened just now, in this thread:
	 * a variable of the environment, or a system call that the kernel denies; else "". */
	const char *(*start_failure)(void);

	/* Starts counting the bytes that the peer reads and writes by this queue pair.  Any thread may
	 * read the counters, also after the queue pair is destroyed, until the caller passes them to
	 * `release_served`.  NULL if there is no memory for them. */
	const struct aiordma_served *(*count_served)(struct ibv_qp *qp);
	void (*release_served)(const struct aiordma_served *served);
	/* Excludes a region, or a window however often it is bound, from these counts. */
	void (*exclude_from_served)(uint32_t rkey);

	/* The calls of single providers' libraries, NULL each that is not installed.  Thread-safe. */
	const struct aiordma_provider_calls *(*provider_calls)(void);
};
