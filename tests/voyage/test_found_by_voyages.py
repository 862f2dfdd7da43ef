"""Bugs that voyages found, each as the short story that shows it."""

from kvferry.client.core import ClientCore, ClientSettings
from kvferry.proto.control import Register, Registered, Rotate, Welcome

NOW = 1_000_000_000


def test_a_rotation_while_the_registration_is_on_its_way_reaches_the_daemon() -> None:
    """Seed 162: Register named the old salt, rotate() found no registration to tell, and the engine's new KV
    was stored under the old namespace."""
    client = ClientCore(ClientSettings("e", world_size=1, key_bytes=8, num_blocks=8, block_tokens=16, salt=b"old"))
    client.attach(NOW)
    client.outgoing()
    client.on_message(Welcome(major=1, minor=0, boot=1, tp_size=1), NOW)
    (register,) = client.outgoing()
    assert isinstance(register, Register) and register.salt == b"old"
    client.rotate(b"new", NOW)
    client.on_message(Registered(incarnation=1, namespace="", epoch=0, attached=0, slots=0), NOW)
    assert client.outgoing() == [Rotate(salt=b"new")]
