"""The cold tier: relocation of segments, manifests for external jobs, erasure, merging."""
