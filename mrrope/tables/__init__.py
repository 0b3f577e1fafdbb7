"""Frequency tables: one for all heads, per key head, per position axis or per layer; their JSON and shipped files."""
