/* The embedded device's table of calls. */
#include "soft.h"

static unsigned progress(void)
{
	return aiordma_embedded_steps() + aiordma_embedded_parts();
}

static uint64_t peer_wakeups(void)
{
	return (uint64_t)aiordma_embedded_woke() << 32 | aiordma_embedded_met_awake();
}

static struct ibv_mr *reg_local_dma(struct ibv_pd *pd)
{
	return aiordma_embedded_reg_own_mr(pd, NULL, SIZE_MAX, 0);
}

static const struct aiordma_device_calls device = {
	.progress = progress,
	.busy_poll = aiordma_embedded_spin,
	.hold_polling = aiordma_embedded_stay,
	.peer_wakeups = peer_wakeups,
	.wake_early = aiordma_wake_early,
	.watch_fds = aiordma_flat_fds,
	.notify_fds = aiordma_embedded_bells,
	.notify_version = aiordma_embedded_bells_changed,
	.reg_own_mr = aiordma_embedded_reg_own_mr,
	.reg_local_dma = reg_local_dma,
	.set_faults = aiordma_embedded_faults,
	.fault_counts = aiordma_embedded_fault_counts,
};

static const struct aiordma_calls table = {
#define CALL(library, result, name, arguments) .name = soft_##name,
#include "abi/calls.h"
#undef CALL
	.device = &device,
};

const struct aiordma_calls *aiordma_embedded_calls(void)
{
	return &table;
}
