"""Rows with their optimizer state, on any tier: tables, caches, prefetch, lookups and fused updates."""
