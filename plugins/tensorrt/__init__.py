"""The attention node in TensorRT and TensorRT-RTX: a plugin written once, over either package.

`runtime_library` finds and imports the package, `node` knows the node's tensors and fields, `plugin` turns it
into the classes that TensorRT calls, and `host` carries errors out of those calls.
"""
