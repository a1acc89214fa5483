"""Private package of cudnn_core."""
