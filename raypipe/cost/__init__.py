"""What tasks, messages and memory cost: from a model of the machine or from measurements, in one form."""
