/* Calls of a device that are not verbs and exist only in this project. This file must not contain
 * preprocessor directives, because cffi reads it.
 *
 * Callers must check each entry, because it is NULL if the device does not implement the call. The
 * embedded device implements every call except `provider_calls`. The table for the system's
 * libraries contains only `provider_calls`.
 */
/* The medium that carries the bytes of a queue pair. */
enum aiordma_wire {
	AIORDMA_WIRE_NONE, /* not connected yet, or no longer connected */
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
	uint64_t chances; /* events that an enabled fault could have affected */
};

/* Bytes of the peer's completed operations on this side's memory. Each operation counts once, even
 * if the peer repeats its request. Atomics do not count. */
struct aiordma_served {
	uint64_t bytes_read;
	uint64_t bytes_written;
};

struct aiordma_device_calls {
	/* Returns a counter of the device's progress. It increases when an application thread does
	 * the device's work, and when a part of a message has been transferred but more parts
	 * follow. */
	unsigned (*progress)(void);

	/* Called with 1 when a thread starts polling in a loop, and with 0 when it stops. Peers
	 * need not notify this process while the thread polls. */
	void (*busy_poll)(int starts);

	/* Announce that the calling thread will poll again soon (1), repeat the announcement (0),
	 * or withdraw it (-1). Until it is withdrawn, peers need not notify this process. If
	 * the calling thread does not poll, the device's thread polls every 0.5 ms instead. */
	void (*hold_polling)(int change);

	/* Returns two counts of writes to peers. The upper 32 bits count writes that had to wake
	 * the peer, and the lower 32 bits count all others. */
	uint64_t (*peer_wakeups)(void);

	/* Make the fd of an event channel readable whenever the device has work to do, and not only
	 * when the channel contains an event. A thread that then checks for an event does the
	 * device's work itself, and does not need to be woken by the device's thread. Other
	 * descriptors are ignored. */
	void (*wake_early)(int fd);

	/* Register memory like ibv_reg_mr(3), but without touching its pages, which are created on
	 * first access. The caller guarantees that all of the memory is mapped with the requested
	 * rights. It must be private, anonymous memory that was mapped for this purpose or taken
	 * from an allocator. ibv_reg_mr(3) touches all pages immediately, like a card that pins
	 * pages. */
	struct ibv_mr *(*reg_own_mr)(struct ibv_pd *pd, void *addr, size_t length, int access);

	/* Create a region that covers the whole address space of the process. Any mapped memory can
	 * then be used for sends, receives and memory windows. Devices that pin pages do not have
	 * this call. */
	struct ibv_mr *(*reg_local_dma)(struct ibv_pd *pd);

	/* Returns the medium of a queue pair. Cards do not have this call, because a card uses one
	 * medium for all queue pairs. The port's attributes tell which one. */
	enum aiordma_wire (*wire)(struct ibv_qp *qp);

	/* Make the queue pair fail when its peer is lost. If the peer's process ends or the path to
	 * it fails, the queue pair raises IBV_EVENT_QP_FATAL and flushes all requests. By default,
	 * losing the peer does not change the state, because a card does not monitor its peers
	 * either. Must be called before the queue pair is connected. */
	void (*end_with_peer)(struct ibv_qp *qp);

	/* Returns 1 if `gid` and `peer` are known to be addresses of the same host. They must be
	 * equal, or both belong to this host. The embedded device connects to the address in a
	 * peer's endpoint, and the caller checks with this function that the address is the
	 * peer's own. */
	int (*same_host)(const uint8_t gid[16], const uint8_t peer[16]);

	/* Returns 1 if this side knows that the peer has withdrawn the connection request of this
	 * id. rdma_accept(3) would then fail. The kernel reports the withdrawal only when
	 * rdma_accept(3) fails. */
	int (*withdrawn)(struct rdma_cm_id *id);

	/* Replace the fault spec of this process, for tests. NULL removes it. Returns 0, or EINVAL
	 * with a message in `error`. */
	int (*set_faults)(const char *spec, char *error, size_t error_size);
	void (*fault_counts)(struct aiordma_fault_counts *counts);

	/* Returns the reason why this thread's latest attempt to open a device or an event channel
	 * failed: an invalid environment variable, or a system call that the kernel denied. Returns
	 * an empty string if there was another reason. */
	const char *(*start_failure)(void);

	/* Start counting the bytes that the peer reads and writes through this queue pair. Any
	 * thread may read the counters, even after the queue pair has been destroyed, until the
	 * caller passes them to `release_served`. Returns NULL if there is no memory for them. */
	const struct aiordma_served *(*count_served)(struct ibv_qp *qp);
	void (*release_served)(const struct aiordma_served *served);
	/* Exclude access through this key from the counts. If the key belongs to a memory window,
	 * the exclusion also applies after the window has been bound again. */
	void (*exclude_from_served)(uint32_t rkey);

	/* Returns the calls of provider libraries. Entries of libraries that are not installed are
	 * NULL. Thread-safe. */
	const struct aiordma_provider_calls *(*provider_calls)(void);
};
