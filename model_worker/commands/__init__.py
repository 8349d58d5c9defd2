"""The commands of an operator: plan, check, config, serve, status.

Each module does one of them, or what two of them share. They speak to a running service over its sockets alone and
import neither torch nor the web workers.
"""
