"""Metrics of worker groups: their table, their values, and the way of any metrics into Ray's own."""
