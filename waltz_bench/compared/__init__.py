"""The baselines and systems that workloads are compared with.

access_cost     the same workload without access control, alternately
tenant_load     greedy tenants with limits, alternately with a calm phase
nats_peer       NATS JetStream
"""
