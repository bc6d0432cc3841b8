"""The admin client of a storage: valid and invalid answers to a request."""

import asyncio

import pytest

from waltz_core.client.links.storage_admin import StorageAdmin
from waltz_core.errors import RemoteProtocolError
from waltz_core.wire.admin_messages import CheckCluster, Done


class Link:
    """A connection whose peer answers with one message."""

    def __init__(self, version, answer):
        self.version = version
        self.answer = answer

    def send(self, message):
        self.sent = message

    async def receive(self):
        return [self.answer]


def send_request(version, number):
    admin = StorageAdmin(Link(version, Done(number)), "s1:15281")
    return asyncio.run(admin.request(Done, CheckCluster, bytes(16), 4))


def test_a_0_13_storage_may_answer_check_cluster_with_sequence_number_minus_1():
    assert send_request(0, -1) == Done(-1)
    assert send_request(0, 0) == Done(0)


@pytest.mark.parametrize(("version", "number"), [(1, -1), (1, 7), (0, 7)])
def test_an_answer_with_another_sequence_number_is_rejected(version, number):
    with pytest.raises(RemoteProtocolError, match="expected an answer to request"):
        send_request(version, number)
