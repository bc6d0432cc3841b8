"""Descriptors of Protobuf files for tests, as a schema registry returns them."""

import base64

from google.protobuf import descriptor_pb2

INT32, INT64, UINT32, DOUBLE, FLOAT, BOOL, STRING, BYTES, ENUM, MESSAGE = (
    *(5, 3, 13, 1, 2, 8, 9, 12, 14, 11),
)
REPEATED = 3


def field(message, name, number, kind, *, type_name=None, label=1, **more):
    if type_name is not None:
        more["type_name"] = type_name
    return message.field.add(name=name, number=number, type=kind, label=label, **more)


def map_field(message, scope, name, number, key, value, type_name=None):
    entry = message.nested_type.add(name=f"{name.title()}Entry")
    entry.options.map_entry = True
    field(entry, "key", 1, key)
    field(entry, "value", 2, value, type_name=type_name)
    field(message, name, number, MESSAGE, type_name=f"{scope}.{entry.name}", label=REPEATED)


def text_of(file) -> str:
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
    field(line, "sku", 1, STRING)
    field(line, "count", 2, UINT32)
    field(order, "id", 1, INT64)
    field(order, "owner", 2, STRING)
    field(order, "at", 3, MESSAGE, type_name=".google.protobuf.Timestamp")
    field(order, "limit", 4, MESSAGE, type_name=".google.protobuf.Int64Value")
    field(order, "day", 5, MESSAGE, type_name=".google.type.Date")
    field(order, "price", 6, MESSAGE, type_name=".confluent.type.Decimal")
    field(order, "tags", 7, STRING, label=REPEATED)
    field(order, "lines", 8, MESSAGE, type_name=".shop.Order.Line", label=REPEATED)
    field(order, "state", 9, ENUM, type_name=".shop.State")
    map_field(order, ".shop.Order", "counts", 10, STRING, INT32)
    map_field(order, ".shop.Order", "named", 11, INT64, MESSAGE, ".shop.Order.Line")
    order.oneof_decl.add(name="payment")
    field(order, "cash", 12, DOUBLE, oneof_index=0)
    field(order, "card", 13, STRING, oneof_index=0)
    order.oneof_decl.add(name="_discount")
    field(order, "discount", 14, INT32, oneof_index=1, proto3_optional=True)
    field(order, "weight", 15, FLOAT)
    field(order, "photo", 16, BYTES)
    field(order, "is_gift", 17, BOOL)
    field(order, "time", 18, MESSAGE, type_name=".google.type.TimeOfDay")
    field(order, "first", 19, MESSAGE, type_name=".shop.Order")
    other = file.message_type.add(name="Refund")
    field(other, "id", 1, INT64)
    return file
