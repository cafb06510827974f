"""Embedding servers: tables on CPU machines, shared by trainers, with bounded and reproducible staleness."""

from tritonemb.server.attach import AtMost, Servers, attach, connect, flush, start
from tritonemb.server.follower import Follower, Publisher, look_up
from tritonemb.server.node import EmbeddingServer
from tritonemb.server.on_ray import start_on_ray

__all__ = [
    "AtMost", "EmbeddingServer", "Follower", "Publisher", "Servers", "attach", "connect", "flush", "look_up", "start",
    "start_on_ray",
]  # fmt: skip
