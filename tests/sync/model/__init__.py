"""Tests of `sync/model`: layouts, snapshots, strategies and bindings."""
