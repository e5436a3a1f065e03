// Command main moves bytes by RDMA writes of many goroutines, each from a queue pair to itself.
//
// Go's runtime preempts threads with signals, also in calls of C; its network poller waits for the
// completions; collections of garbage and new processes go on meanwhile.
package main

/*
#cgo LDFLAGS: -libverbs
#include <infiniband/verbs.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 65536 };

struct loop {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	struct ibv_qp *qp;
	char *memory;
};

static struct ibv_context *open_first(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_context *context = devices && devices[0] ? ibv_open_device(devices[0]) : NULL;

	ibv_free_device_list(devices);
	return context;
}

static int change(struct ibv_qp *qp, struct ibv_qp_attr *attr, enum ibv_qp_state to, int mask)
{
	attr->qp_state = to;
	return ibv_modify_qp(qp, attr, IBV_QP_STATE | mask);
}

static int start(struct loop *loop)
{
	int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	union ibv_gid gid;

	if (!(loop->pd = ibv_alloc_pd(loop->context)) ||
	    !(loop->channel = ibv_create_comp_channel(loop->context)) ||
	    !(loop->cq = ibv_create_cq(loop->context, 1, NULL, loop->channel, 0)) ||
	    !(loop->memory = malloc(2 * SIZE)) ||
	    !(loop->mr = ibv_reg_mr(loop->pd, loop->memory, 2 * SIZE, access)) ||
	    ibv_query_gid(loop->context, 1, 0, &gid))
		return -1;
	struct ibv_qp_init_attr wanted = {.send_cq = loop->cq, .recv_cq = loop->cq,
					  .qp_type = IBV_QPT_RC,
					  .cap = {.max_send_wr = 1, .max_send_sge = 1}};
	if (!(loop->qp = ibv_create_qp(loop->pd, &wanted)))
		return -1;
	struct ibv_qp_attr attr = {
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE, .port_num = 1, .path_mtu = IBV_MTU_1024,
		.dest_qp_num = loop->qp->qp_num, .timeout = 14, .retry_cnt = 7,
		.ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid, .hop_limit = 64}}};
	return change(loop->qp, &attr, IBV_QPS_INIT,
		      IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) ||
	       change(loop->qp, &attr, IBV_QPS_RTR,
		      IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
			      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) ||
	       change(loop->qp, &attr, IBV_QPS_RTS,
		      IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
			      IBV_QP_MAX_QP_RD_ATOMIC);
}

static int post(struct loop *loop, int byte)
{
	struct ibv_sge sge = {(uintptr_t)loop->memory, SIZE, loop->mr->lkey};
	struct ibv_send_wr *bad, wr = {.opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
				       .sg_list = &sge, .num_sge = 1,
				       .wr.rdma = {(uintptr_t)loop->memory + SIZE, loop->mr->rkey}};

	memset(loop->memory, byte, SIZE);
	return ibv_req_notify_cq(loop->cq, 0) || ibv_post_send(loop->qp, &wr, &bad);
}

// After the channel has become readable.
static int arrived(struct loop *loop)
{
	struct ibv_cq *cq;
	struct ibv_wc wc;
	void *context;

	if (ibv_get_cq_event(loop->channel, &cq, &context))
		return -1;
	ibv_ack_cq_events(cq, 1);
	return ibv_poll_cq(cq, 1, &wc) != 1 || wc.status != IBV_WC_SUCCESS ||
	       memcmp(loop->memory, loop->memory + SIZE, SIZE);
}

static int stop(struct loop *loop)
{
	return ibv_destroy_qp(loop->qp) || ibv_dereg_mr(loop->mr) || ibv_destroy_cq(loop->cq) ||
	       ibv_destroy_comp_channel(loop->channel) || ibv_dealloc_pd(loop->pd);
}
*/
import "C"

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
)

func check(failed bool, what string) {
	if failed {
		fmt.Println(what, "failed")
		os.Exit(1)
	}
}

func write(context *C.struct_ibv_context, times int) {
	loop := C.struct_loop{context: context}
	check(C.start(&loop) != 0, "start")
	// A copy of the descriptor, which the poller may close.
	fd, err := syscall.Dup(int(loop.channel.fd))
	check(err != nil || syscall.SetNonblock(fd, true) != nil, "dup")
	channel := os.NewFile(uintptr(fd), "completions")
	events, err := channel.SyscallConn()
	check(err != nil, "SyscallConn")
	for i := 0; i < times; i++ {
		check(C.post(&loop, C.int(i)) != 0, "post")
		status := C.int(-1)
		err := events.Read(func(uintptr) bool {
			var waiting bool
			status, waiting = arrive(&loop)
			return !waiting
		})
		check(err != nil || status != 0, "write")
	}
	channel.Close()
	check(C.stop(&loop) != 0, "stop")
}

// Its second value tells that there is nothing yet.
func arrive(loop *C.struct_loop) (C.int, bool) {
	status, err := C.arrived(loop)
	return status, status < 0 && err == syscall.EAGAIN
}

func main() {
	context := C.open_first()
	check(context == nil, "ibv_open_device")
	var writers sync.WaitGroup
	for i := 0; i < 16; i++ {
		writers.Add(1)
		go func() {
			defer writers.Done()
			write(context, 20)
		}()
	}
	for i := 0; i < 10; i++ {
		runtime.GC()
		check(exec.Command("true").Run() != nil, "true")
	}
	writers.Wait()
	check(C.ibv_close_device(context) != 0, "ibv_close_device")
	fmt.Println("written")
}
