"""Embedding servers: tables on CPU machines, shared by trainers, with bounded and reproducible staleness."""

from tritonemb.server.attach import AtMost, Servers, attach, connect, flush, start
from tritonemb.server.node import EmbeddingServer
from tritonemb.server.on_ray import start_on_ray

__all__ = ["AtMost", "EmbeddingServer", "Servers", "attach", "connect", "flush", "start", "start_on_ray"]
