"""Payloads with schemas: Avro and Protobuf in Confluent's wire format, and the schema registry.

`formats.py` contains the serializers `Avro` and `Protobuf`, which the client, `scan` and Spark use.
`schema_prefix.py` parses the bytes before a payload, which identify its schema.
`registry_client.py` requests schemas (`registered_schemas.py`) from a schema registry, over
`registry_http.py`; `registry_urls.py` parses the registry's URLs. `avro_codec.py` and
`protobuf_codec.py` are the only files that import fastavro and protobuf. `avro_schemas.py` checks
schemas, and derives them from columns. `avro_values.py`, `protobuf_values.py` and
`strict_values.py` convert values.
"""
