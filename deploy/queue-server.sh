#!/bin/sh
# Run a Valkey or Redis in the foreground, as Penstock needs it: `queue-server.sh FOLDER URL_FILE`.
#
# FOLDER keeps the append-only file and the users that `queues acl` writes. URL_FILE holds the operator's URL,
# redis://:PASSWORD@HOST:PORT/0. The server takes its password and port from there, and listens on all addresses.
# Exit code 78: URL_FILE is not readable, or has another form. 127: no server in PATH.
set -eu
umask 077
folder=$1 url_file=$2

form='^redis://:\([^:@/]\{1,\}\)@[^:@/]\{1,\}:\([0-9]\{1,5\}\)/0$'
password=$(sed -n "s|$form|\\1|p" "$url_file") || exit 78
port=$(sed -n "s|$form|\\2|p" "$url_file")
if [ -z "$password" ]; then
  echo "queue-server: $url_file: expected one line redis://:PASSWORD@HOST:PORT/0, found another form" >&2
  exit 78
fi
if ! server=$(command -v valkey-server || command -v redis-server); then
  echo "queue-server: no valkey-server or redis-server in PATH: install one" >&2
  exit 127
fi

# The file holds a hash, and the command line no password: every local user may read a command line.
hash=$(printf %s "$password" | sha256sum | cut -d ' ' -f 1)
mkdir -p "$folder"
touch "$folder/users.acl"
{
  echo "user default on #$hash ~* &* +@all"
  grep '^user ' "$folder/users.acl" | grep -v '^user default ' || :
} > "$folder/users.new"
mv "$folder/users.new" "$folder/users.acl"

exec "$server" --port "$port" --dir "$folder" --aclfile "$folder/users.acl" --appendonly yes \
  --appendfsync everysec --save '' --maxmemory-policy noeviction --daemonize no
