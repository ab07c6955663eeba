"""Serialised tf.train.Examples, read without TensorFlow: a worker process starts in a second.

(With it, each would take seven seconds of CPU and several hundred MB.)
"""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto


def parse(record: bytes, *names: str) -> list[list]:
  """The values of these features, bytes or ints; empty for one that the record does not have."""
  features = _Example.FromString(record).features.feature
  return [_values(features[name]) for name in names]


def _values(feature):
  return feature.bytes_list.value or feature.int64_list.value


def _message():
  """The part of tensorflow/core/example/example.proto that data sets here use."""
  package = "xe_retrieval"
  file = descriptor_pb2.FileDescriptorProto(
    name="xe_retrieval/example.proto", package=package, syntax="proto3"
  )

  def message(name, *fields, within=file.message_type):
    made = within.add(name=name)
    for number, field, kind, repeated in fields:
      made.field.add(
        name=field,
        number=number,
        type=_Field.TYPE_MESSAGE if isinstance(kind, str) else kind,
        type_name=f".{package}.{kind}" if isinstance(kind, str) else None,
        label=_Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL,
      )
    return made

  message("BytesList", (1, "value", _Field.TYPE_BYTES, True))
  message("Int64List", (1, "value", _Field.TYPE_INT64, True))
  message("Feature", (1, "bytes_list", "BytesList", False), (3, "int64_list", "Int64List", False))
  features = message("Features", (1, "feature", "Features.FeatureEntry", True))
  key_value = (1, "key", _Field.TYPE_STRING, False), (2, "value", "Feature", False)
  message("FeatureEntry", *key_value, within=features.nested_type).options.map_entry = True
  message("Example", (1, "features", "Features", False))
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.Example"))


_Example = _message()
