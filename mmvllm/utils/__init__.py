"""Helpers for messages, argument checks, devices, host-device copies, and limits of time and memory."""
