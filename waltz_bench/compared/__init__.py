"""What a workload is compared with.

access_cost     the same workload without access control, in turn
nats_peer       NATS JetStream
"""
