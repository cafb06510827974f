"""Embedding servers: tables on CPU machines, shared by trainers, with bounded and reproducible staleness."""

from tritonemb.server.attach import AtMost, Servers, attach, flush, start

__all__ = ["AtMost", "Servers", "attach", "flush", "start"]
