/* Dropped RoCE packets appear in the trace with the reason. test_trace_drops covers other drops. */
#include "roce_stage.h"
#include "trace_side.h"

static char folder[64], path[128];

static void traced(void (*step)(void))
{
	CHECK_OK(aiordma_trace_start(path, (char[4097]){0}, 4097));
	step();
	aiordma_trace_stop();
	CHECK_OK(unlink(path));
}

static void dropped_packets_are_traced_with_their_reason(void)
{
	struct stage stage;
	struct side unready;
	struct soft_roce_packet packet;
	uint8_t bytes[LONGEST];

	open_stage(&stage, (struct options){0});
	OPEN(&unready);
	const uint32_t own = stage.side.qp->qp_num;

	packet = packet_of(&stage, SOFT_ROCE_SEND_ONLY, 7);
	packet.pkey = 0x1234;
	send_packet(&stage, packet);
	CHECK(field_is(expect_drop(path, own, "PKEY"), "remote", "127.0.0.9"));
	send_packet(&stage, packet_of(&stage, SOFT_ROCE_UC | SOFT_ROCE_SEND_ONLY, 7));
	expect_drop(path, own, "TRANSPORT");
	packet = packet_of(&stage, SOFT_ROCE_SEND_ONLY, 7);
	packet.dest_qpn = unready.qp->qp_num;
	send_packet(&stage, packet);
	expect_drop(path, packet.dest_qpn, "QP_STATE");
	packet.dest_qpn = own;
	send_bytes(stage.stranger, bytes, build(bytes, stranger_gid, &packet));
	CHECK(field_is(expect_drop(path, own, "SOURCE"), "remote", "127.0.0.10"));
	size_t length = build(bytes, peer_gid, &packet);

	bytes[length - 1] ^= 1;
	send_bytes(stage.peer, bytes, length);
	expect_drop(path, own, "ICRC");
	send_bytes(stage.peer, bytes, 3);
	while (!count_of("dropped", "reason", "HEADER"))
		read_trace(path);
	expect_no_response(&stage);
	close_side(&unready);
	close_stage(&stage);
}

/* Any host can send these packets, so the number of trace lines per second is limited. */
static void trace_lines_per_second_are_limited_in_a_flood(void)
{
	enum { PER_SECOND = 100, PACKETS = 1000, SECOND = 1000000000 };
	struct stage stage;
	uint64_t first = 0;
	size_t lines = 0, omitted = 0;

	open_stage(&stage, (struct options){0});
	struct soft_roce_packet packet = packet_of(&stage, SOFT_ROCE_SEND_ONLY, 7);

	packet.dest_qpn ^= 0x1555;
	for (int i = 0; i < PACKETS; i++)
		send_packet(&stage, packet);
	post_receive_at(&stage.side, 1, 0, 64);
	send_request(&stage, SOFT_ROCE_SEND_ONLY, 7); /* after all of them */
	expect_wc(&stage.side, 1, IBV_WC_SUCCESS);
	read_trace(path);
	EACH_LINE ("dropped") {
		first = lines++ ? first : number_field(line, "t");
		omitted += field(line, "omitted") ? number_field(line, "omitted") : 0;
		CHECK(lines <=
		      1 + PER_SECOND + (number_field(line, "t") - first) * PER_SECOND / SECOND);
	}
	CHECK(lines > 0 && lines + omitted <= PACKETS);
	close_stage(&stage);
}

int main(void)
{
	limit_seconds(60);
	snprintf(path, sizeof(path), "%s/trace", new_folder(folder));
	STEP(traced(dropped_packets_are_traced_with_their_reason));
	STEP(traced(trace_lines_per_second_are_limited_in_a_flood));
	CHECK_OK(rmdir(folder));
	return 0;
}
