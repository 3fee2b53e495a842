"""Codecs: what a boundary tensor becomes on the wire. State of each boundary; no process groups."""
