"""Descriptors of Protobuf files for tests, as a schema registry returns them."""

import base64

from google.protobuf import descriptor_pb2

INT32, INT64, UINT32, DOUBLE, FLOAT, BOOL, STRING, BYTES, ENUM, MESSAGE = (
    *(5, 3, 13, 1, 2, 8, 9, 12, 14, 11),
)
REPEATED = 3


def add_field(message, name, number, kind, *, type_name=None, label=1, **more):
    if type_name is not None:
        more["type_name"] = type_name
    return message.field.add(name=name, number=number, type=kind, label=label, **more)


def add_map_field(message, scope, name, number, key, value, type_name=None):
    entry = message.nested_type.add(name=f"{name.title()}Entry")
    entry.options.map_entry = True
    add_field(entry, "key", 1, key)
    add_field(entry, "value", 2, value, type_name=type_name)
    add_field(message, name, number, MESSAGE, type_name=f"{scope}.{entry.name}", label=REPEATED)


def encode_descriptor(file) -> str:
    return base64.b64encode(file.SerializeToString()).decode()


def order_file(name="order.proto"):
    """An order with each kind of field."""
    file = descriptor_pb2.FileDescriptorProto(name=name, package="shop", syntax="proto3")
    file.dependency.extend(
        [
            "google/protobuf/timestamp.proto",
            "google/protobuf/wrappers.proto",
            "google/type/date.proto",
            "google/type/timeofday.proto",
            "confluent/type/decimal.proto",
            "confluent/meta.proto",
        ]
    )
    state = file.enum_type.add(name="State")
    for number, each in enumerate(("NEW", "PAID")):
        state.value.add(name=each, number=number)
    order = file.message_type.add(name="Order")
    line = order.nested_type.add(name="Line")
    add_field(line, "sku", 1, STRING)
    add_field(line, "count", 2, UINT32)
    add_field(order, "id", 1, INT64)
    add_field(order, "owner", 2, STRING)
    add_field(order, "at", 3, MESSAGE, type_name=".google.protobuf.Timestamp")
    add_field(order, "limit", 4, MESSAGE, type_name=".google.protobuf.Int64Value")
    add_field(order, "day", 5, MESSAGE, type_name=".google.type.Date")
    add_field(order, "price", 6, MESSAGE, type_name=".confluent.type.Decimal")
    add_field(order, "tags", 7, STRING, label=REPEATED)
    add_field(order, "lines", 8, MESSAGE, type_name=".shop.Order.Line", label=REPEATED)
    add_field(order, "state", 9, ENUM, type_name=".shop.State")
    add_map_field(order, ".shop.Order", "counts", 10, STRING, INT32)
    add_map_field(order, ".shop.Order", "named", 11, INT64, MESSAGE, ".shop.Order.Line")
    order.oneof_decl.add(name="payment")
    add_field(order, "cash", 12, DOUBLE, oneof_index=0)
    add_field(order, "card", 13, STRING, oneof_index=0)
    order.oneof_decl.add(name="_discount")
    add_field(order, "discount", 14, INT32, oneof_index=1, proto3_optional=True)
    add_field(order, "weight", 15, FLOAT)
    add_field(order, "photo", 16, BYTES)
    add_field(order, "is_gift", 17, BOOL)
    add_field(order, "time", 18, MESSAGE, type_name=".google.type.TimeOfDay")
    add_field(order, "first", 19, MESSAGE, type_name=".shop.Order")
    other = file.message_type.add(name="Refund")
    add_field(other, "id", 1, INT64)
    return file
