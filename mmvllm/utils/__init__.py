"""Texts of messages, checks of arguments, devices, copies, limits of time and memory."""
