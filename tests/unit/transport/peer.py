"""The other end of a link, and messages of any size."""

from waltz_core.wire.messages import AppendRaw

ANY = "127.0.0.1"


def raw(size, sequence=0):
    return AppendRaw(1, sequence, 3, 4, b"", bytes(size), 0, bytes(16), ())


class Peer:
    """Records the messages and closed links that callbacks of a link receive."""

    def __init__(self):
        self.links, self.messages, self.closed = [], [], []

    def connected(self, link):
        self.links.append(link)
        link.start(self.messages.extend, self.closed.append)
