"""Runs in which processes die at chosen places, judged by what they leave behind."""
