"""What a workload is compared with.

access_cost     the same workload without access control, in turn
tenant_load     greedy tenants with limits, in turn with a calm phase
nats_peer       NATS JetStream
"""
