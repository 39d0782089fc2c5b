"""The data types and errors that every layer may use. Messages to other processes are msgspec Structs.

Knows no layer, and computes nothing. Tensors appear only in annotations, so that a client imports it without torch.
"""
