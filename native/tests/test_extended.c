/* Tests the wrappers of calls that the provider offers through function pointers in the context.
 * If a function pointer is missing, the wrapper must fail with EOPNOTSUPP. */
#include <stdbool.h>

#include "verbs/boundary.h"

#include "cm_check.h"

/* Arguments for the calls. All objects belong to `context`. */
struct stage {
	struct ibv_context *context;
	struct ibv_pd pd;
	struct ibv_cq cq;
	struct ibv_qp qp;
	struct ibv_srq srq;
	struct ibv_dm dm;
	struct ibv_td td;
	struct ibv_xrcd xrcd;
	uint32_t number;
};

enum { ANSWER = 77 };

static int return_answer(void)
{
	return ANSWER;
}

static void *return_answer_as_pointer(void)
{
	return (void *)(uintptr_t)ANSWER;
}

/* Returns `pointer` as an integer, or errno if it is NULL. The results of calls that return a
 * pointer can then be checked like those of calls that return an int. */
static int result_of_pointer(void *pointer)
{
	return pointer ? (int)(uintptr_t)pointer : errno;
}

/* The wrapper is called aiordma_query_port, because the libraries export an older call under the
 * name ibv_query_port. */
#define aiordma_ibv_query_port aiordma_query_port

#define NUMBER(name, ...)                                                                          \
	static int call_##name(struct stage *s)                                                    \
	{                                                                                          \
		return aiordma_ibv_##name(__VA_ARGS__);                                            \
	}
#define POINTER(name, ...)                                                                         \
	static int call_##name(struct stage *s)                                                    \
	{                                                                                          \
		return result_of_pointer(aiordma_ibv_##name(__VA_ARGS__));                         \
	}

NUMBER(query_device_ex, s->context, NULL)
NUMBER(query_port, s->context, 1, NULL)
NUMBER(query_rt_values_ex, s->context, NULL)
POINTER(create_cq_ex, s->context, NULL)
NUMBER(modify_cq, &s->cq, NULL)
NUMBER(advise_mr, &s->pd, 0, 0, NULL, 0)
POINTER(alloc_null_mr, &s->pd)
POINTER(alloc_dm, s->context, NULL)
NUMBER(free_dm, &s->dm)
POINTER(reg_dm_mr, &s->pd, &s->dm, 0, 0, 0)
POINTER(alloc_td, s->context, NULL)
NUMBER(dealloc_td, &s->td)
POINTER(alloc_parent_domain, s->context, NULL)
POINTER(open_xrcd, s->context, NULL)
NUMBER(close_xrcd, &s->xrcd)
POINTER(create_srq_ex, s->context, NULL)
NUMBER(get_srq_num, &s->srq, &s->number)
POINTER(create_qp_ex, s->context, NULL)
POINTER(open_qp, s->context, NULL)
NUMBER(modify_qp_rate_limit, &s->qp, NULL)

#define OF(member) offsetof(struct verbs_context, member)

static const struct {
	int (*call)(struct stage *s);
	size_t member;
	bool pointer;
} calls[] = {
	{call_query_device_ex, OF(query_device_ex), false},
	{call_query_port, OF(query_port), false},
	{call_query_rt_values_ex, OF(query_rt_values), false},
	{call_create_cq_ex, OF(create_cq_ex), true},
	{call_modify_cq, OF(modify_cq), false},
	{call_advise_mr, OF(advise_mr), false},
	{call_alloc_null_mr, OF(alloc_null_mr), true},
	{call_alloc_dm, OF(alloc_dm), true},
	{call_free_dm, OF(free_dm), false},
	{call_reg_dm_mr, OF(reg_dm_mr), true},
	{call_alloc_td, OF(alloc_td), true},
	{call_dealloc_td, OF(dealloc_td), false},
	{call_alloc_parent_domain, OF(alloc_parent_domain), true},
	{call_open_xrcd, OF(open_xrcd), true},
	{call_close_xrcd, OF(close_xrcd), false},
	{call_create_srq_ex, OF(create_srq_ex), true},
	{call_get_srq_num, OF(get_srq_num), false},
	{call_create_qp_ex, OF(create_qp_ex), true},
	{call_open_qp, OF(open_qp), true},
	{call_modify_qp_rate_limit, OF(modify_qp_rate_limit), false},
};

static void init_stage(struct stage *s, struct ibv_context *context)
{
	*s = (struct stage){
		.context = context,
		.pd.context = context,
		.cq.context = context,
		.qp.context = context,
		.srq.context = context,
		.dm.context = context,
		.td.context = context,
		.xrcd.context = context,
	};
}

/* Check that a wrapper calls its own member of struct verbs_context, by setting only this
 * member. If the member is NULL, or if the context is not extended, the wrapper must fail. */
static void wrapper_calls_its_own_context_member(size_t i)
{
	struct verbs_context *x = calloc(1, sizeof(*x));
	struct stage s;
	void (*function)(void) = calls[i].pointer ? (void (*)(void))return_answer_as_pointer
						  : (void (*)(void))return_answer;

	CHECK(x);
	init_stage(&s, &x->context);
	x->sz = sizeof(*x);
	x->context.abi_compat = AIORDMA_ABI_EXTENDED;
	CHECK_EQUAL(calls[i].call(&s), EOPNOTSUPP); /* the provider left it out */
	memcpy((char *)x + calls[i].member, &function, sizeof(function));
	CHECK_EQUAL(calls[i].call(&s), ANSWER);
	x->context.abi_compat = NULL;
	CHECK_EQUAL(calls[i].call(&s), EOPNOTSUPP);
	free(x);
}

/* Check that a wrapper fails if the context belongs to an older library that does not have the
 * member. The structure grows at its head, so the older structure starts right after the member.
 * The address sanitizer detects any access before this start. */
static void wrapper_fails_with_an_older_library(size_t i)
{
	size_t next = calls[i].member + sizeof(void (*)(void));
	size_t size = sizeof(struct verbs_context) - next;
	char *memory = calloc(1, size);
	struct stage s;

	CHECK(memory);
	struct verbs_context *x = (struct verbs_context *)(memory - next);

	init_stage(&s, &x->context);
	x->sz = size;
	x->context.abi_compat = AIORDMA_ABI_EXTENDED;
	CHECK_EQUAL(calls[i].call(&s), EOPNOTSUPP);
	free(memory);
}

static struct ibv_device_attr_ex *given_attr;

static int check_arguments(struct ibv_context *context,
			   const struct ibv_query_device_ex_input *input,
			   struct ibv_device_attr_ex *attr, size_t size)
{
	CHECK(context->abi_compat == AIORDMA_ABI_EXTENDED);
	CHECK(!input);
	CHECK_EQUAL(size, sizeof(*attr));
	given_attr = attr;
	return 0;
}

static void wrapper_passes_its_arguments(void)
{
	struct verbs_context x = {.sz = sizeof(x),
				  .query_device_ex = check_arguments,
				  .context.abi_compat = AIORDMA_ABI_EXTENDED};
	struct ibv_device_attr_ex attr;

	CHECK_EQUAL(aiordma_ibv_query_device_ex(&x.context, &attr), 0);
	CHECK(given_attr == &attr);
}

static struct ibv_mw *alloc_window(struct ibv_pd *pd, enum ibv_mw_type type)
{
	CHECK_EQUAL(type, IBV_MW_TYPE_2);
	(void)pd;
	return (struct ibv_mw *)(uintptr_t)ANSWER;
}

static int bind_window(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
	(void)qp;
	(void)mw;
	(void)bind;
	return ANSWER;
}

static int dealloc_window(struct ibv_mw *mw)
{
	(void)mw;
	return ANSWER;
}

/* Check the calls for memory windows, whose function pointers are in struct ibv_context. Binding
 * must fail for a type 2 window, which is bound by posting a request (ibv_bind_mw(3)). */
static void window_calls_use_context_ops(void)
{
	struct ibv_context context = {.cmd_fd = -1};
	struct ibv_pd pd = {.context = &context};
	struct ibv_qp qp = {.context = &context};
	struct ibv_mw mw = {.context = &context, .type = IBV_MW_TYPE_1};
	struct ibv_mw_bind bind = {.wr_id = 1};

	CHECK_EQUAL(result_of_pointer(aiordma_ibv_alloc_mw(&pd, IBV_MW_TYPE_2)), EOPNOTSUPP);
	CHECK_EQUAL(aiordma_ibv_bind_mw(&qp, &mw, &bind), EOPNOTSUPP);
	CHECK_EQUAL(aiordma_ibv_dealloc_mw(&mw), EOPNOTSUPP);
	context.ops.alloc_mw = alloc_window;
	context.ops.bind_mw = bind_window;
	context.ops.dealloc_mw = dealloc_window;
	CHECK_EQUAL(result_of_pointer(aiordma_ibv_alloc_mw(&pd, IBV_MW_TYPE_2)), ANSWER);
	CHECK_EQUAL(aiordma_ibv_bind_mw(&qp, &mw, &bind), ANSWER);
	CHECK_EQUAL(aiordma_ibv_dealloc_mw(&mw), ANSWER);
	mw.type = IBV_MW_TYPE_2;
	CHECK_EQUAL(aiordma_ibv_bind_mw(&qp, &mw, &bind), EINVAL);
}

static void dm_copy_without_provider_support_fails(void)
{
	struct ibv_dm dm = {.comp_mask = 0};
	char byte = 0;

	CHECK_EQUAL(aiordma_ibv_memcpy_to_dm(&dm, 0, &byte, 1), EOPNOTSUPP);
	CHECK_EQUAL(aiordma_ibv_memcpy_from_dm(&byte, &dm, 0, 1), EOPNOTSUPP);
}

int main(void)
{
	for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
		STEP(wrapper_calls_its_own_context_member(i));
		STEP(wrapper_fails_with_an_older_library(i));
	}
	STEP(wrapper_passes_its_arguments());
	STEP(window_calls_use_context_ops());
	STEP(dm_copy_without_provider_support_fails());
	return 0;
}
