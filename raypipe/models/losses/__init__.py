"""Losses given as functions of a model and a batch: those of users, and some that raypipe brings."""
