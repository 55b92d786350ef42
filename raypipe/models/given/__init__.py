"""Model instances as they are: their operations and values, written by the driver and read by the workers."""
