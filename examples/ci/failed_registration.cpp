#include <cstdint>
#include <cstdio>

#include <dlfcn.h>
#include <infiniband/verbs.h>

template <typename Function> Function *find(const char *name)
{
	return reinterpret_cast<Function *>(dlsym(RTLD_DEFAULT, name));
}

int main()
{
	auto faults = find<int(const char *, char *, size_t)>("aiordma_embedded_faults");
	auto count = find<std::int64_t(const char *)>("aiordma_embedded_fault_count");

	if (!faults || !count) {
		std::puts("this test injects faults, so start it with aiordma run");
		return 1;
	}
	static char memory[4096];
	ibv_device **devices = ibv_get_device_list(nullptr);
	ibv_context *context = ibv_open_device(devices[0]);
	ibv_pd *pd = context ? ibv_alloc_pd(context) : nullptr;

	if (!pd)
		return 1;
	faults("register=@1", nullptr, 0);
	ibv_mr *refused = ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE);
	faults(nullptr, nullptr, 0);
	ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE);
	bool passed = !refused && mr && count("registrations") == 1;

	std::puts(passed ? "passed" : "failed");
	passed &= !ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd) && !ibv_close_device(context);
	ibv_free_device_list(devices);
	return passed ? 0 : 1;
}
