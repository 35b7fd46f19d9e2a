"""Front end for ONNX files."""
