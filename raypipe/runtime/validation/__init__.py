"""Metrics of a validation: the predictions that the last stages keep, and the user's function of all of them."""
