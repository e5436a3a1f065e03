"""Messages, cancellation, order and memory on connections that encrypt.

The tests are those of plain connections, with another `factory`.  It allows operations on memory,
which some of them use beside messages.  Some of the random programs encrypt as well.
"""

# ruff: noqa: F401 - pytest finds them here

from __future__ import annotations

from dataclasses import replace

import pytest

from .connection_factory import KEY, ConnectionFactory
from .marks import on_pair
from .test_arrivals import test_all_that_came_before_the_end
from .test_bundles import (
    test_cancelled_before_its_turn_ends,
    test_no_more_in_one_bundle_than_is_allowed,
    test_the_memory_goes_with_the_last_that_looks,
)
from .test_cancel import (
    test_close_cancelled_at_any_time_ends_the_connection,
    test_connect_cancelled_at_any_time,
    test_one_sided_cancelled_at_any_time,
    test_send_cancelled_in_the_queue_is_not_sent,
)
from .test_lifecycle import (
    test_abort_is_seen_as_broken,
    test_close_delivers_what_was_to_be_sent,
    test_goodbye,
    test_messages_that_arrived_outlive_the_end,
)
from .test_messages import (
    test_each_side_keeps_to_the_receives_of_the_other,
    test_every_kind_of_buffer,
    test_first_message_right_after_connecting,
    test_immediate_data,
    test_order_of_concurrent_sends,
    test_sender_may_change_its_buffer_afterwards,
    test_sending_a_received_message_back,
    test_sizes,
)
from .test_order import test_long_write_with_immediate_keeps_its_turn
from .test_pool_exhausted import (
    test_fetching_waits,
    test_memory_of_ones_own_need_not_wait,
    test_messages_wait_and_keep_their_order,
)
from .test_receive_sizes import test_in_both_directions_with_all_that_travels
from .test_recv_into import (
    test_a_message_that_does_not_fit_stays,
    test_more_than_the_pool_holds,
    test_the_end_in_the_middle,
)
from .test_recv_into import test_sizes as test_sizes_into_memory
from .test_several_buffers import (
    test_cancelled_at_any_moment,
    test_in_any_kind_of_memory,
    test_they_are_one_message,
    test_what_allocate_raises,
)

pytestmark = on_pair


@pytest.fixture
def factory(factory: ConnectionFactory) -> ConnectionFactory:
    return replace(factory, auth=KEY, encrypt="messages")
