#!lua name=penstock_4
-- The protocol's functions on the queue server. Each is one atomic step and idempotent: a call that is
-- sent again after a lost reply changes nothing more.
--
-- The hash `open` maps a ticket to "stream|entry|version": the place of its only entry, and the version at
-- which the learner first issued it. A ticket that is not in `open` has ended or was never issued.
--
-- The failed attempts of a ticket are stored on its entry, so they end with the stage. Field `a` counts
-- those before the entry was added. The delivery count, less one, counts the leases lost since: a = 1 and
-- 2 deliveries are two failed attempts. While the ticket runs alone, ALONE is added to the delivery count.
--
-- No clock decides about a lease, as the server's may be set. Each renewal adds RENEWAL to the delivery count,
-- and a count that was not seen to change for a lease, by the clock of whoever watches, has run out.

local GROUP = 'workers'
local ALONE = 1000000
local RENEWAL = 2 * ALONE
local MOST_RENEWALS = 1e9
local MOST_LOST = 100000
local LOOKED_AT = 1000  -- the oldest entries; later ones come up as these end
local FENCE_JUMP = 1000  -- a fence that is higher by more was written by no learner
local DEAD_KEPT = 10000  -- dead letters are for people; the verdict is in the journal
local DAY_MS = 24 * 3600 * 1000
local LAST_MS = 1e14  -- of an id, in the year 5138: no clock that was set reaches it
local LONGEST_ENTRY = 41  -- two numbers of 64 bits: what is longer no server made
local KINDS = {  -- of the keys that are no streams
  fence = 'hash', open = 'hash', ledger = 'hash', malformed = 'hash', costs = 'hash',
  deltas = 'hash', processes = 'hash', supervisors = 'hash', scale = 'hash',
  contract = 'string', weights = 'string', state = 'string',
}
local WORK_STREAMS = {tickets = true, eval_tickets = true, rollouts = true}
local TICKET_STREAMS = {  -- each with the beginning of the names of its tickets
  tickets = 'train:', eval_tickets = 'eval:', rollouts = '', scored = 'train:', evaluated = 'eval:',
}

-- Only texts that Penstock writes are read, as in common/wire/ids.py. Others (007, 1e3, 19 digits) may come
-- from any client; as numbers they would stop a learner, or be another number than they look.
local function is_number(text)
  return text and #text <= 15 and (text == '0' or string.find(text, '^[1-9]%d*$') ~= nil)
end

local function is_version(text)
  local incarnation, step = string.match(text, '^(%d+)%.(%d+)$')
  return is_number(incarnation) and is_number(step)
end

local function is_ticket(text)
  local version, index = string.match(text, '^eval:([^:]*):([^:]*)$')
  if version then return is_version(version) and is_number(index) end
  return is_number(string.match(text, '^train:(.*)$'))
end

-- Of a field that is there twice, the last one counts, as in the Python client.
local function field_of(entry, name)
  local found = false
  for i = 1, #entry[2], 2 do
    if entry[2][i] == name then found = entry[2][i + 1] end
  end
  return found
end

-- Returns stream, entry and version; nil unless the place is on one of this run's streams.
local function split_place(open, place)
  local stream, entry, version = string.match(place, '^([^|]*)|(%d+%-%d+)|([^|]*)$')
  local run, name = string.match(stream or '', '^(.*:)([^:]*)$')
  local known = run == string.match(open, '^(.*:)') and TICKET_STREAMS[name]
  if known and is_version(version) and #entry <= LONGEST_ENTRY then
    return stream, entry, version
  end
end

local function place_of(stream, entry, version) return stream .. '|' .. entry .. '|' .. version end

-- Returns the entry, or nil. An error means an id beyond 64 bits, or another kind of key: no entry there.
local function find(stream, entry)
  local found = redis.pcall('XRANGE', stream, entry, entry)
  return not found.err and found[1] or nil
end

-- Returns the entry at a place if it is the ticket's own: `open` may name another ticket's entry, or a stream
-- where nobody looks for such tickets: a place of train:2 on `evaluated` would never be read.
local function find_own(ticket, stream, entry)
  local kind = stream and TICKET_STREAMS[string.match(stream, '([^:]*)$')]
  local found = kind and string.sub(ticket, 1, #kind) == kind and find(stream, entry)
  return found and field_of(found, 't') == ticket and found
end

local function count_up(hash, name)
  if not is_number(redis.call('HGET', hash, name) or '0') then redis.call('HDEL', hash, name) end
  redis.call('HINCRBY', hash, name, 1)
end

-- Returns the version of first issue if this entry is the ticket's present one, else false.
local function version_at(open, ticket, stream, entry)
  local place, here = redis.call('HGET', open, ticket), place_of(stream, entry, '')
  return place and string.sub(place, 1, #here) == here and string.sub(place, #here + 1)
end

-- Returns the field `a` as a number; nil for a text that Penstock does not write.
local function failed_before(found)
  local count = field_of(found, 'a') or '0'
  return is_number(count) and tonumber(count) < ALONE and tonumber(count) or nil
end

-- `pending` is a row of XPENDING: entry, consumer, idle time, delivery count.
-- So many leases are never lost, as a ticket is dead before: another client set such a count, which says nothing.
local function is_foreign(pending) return (pending[4] - 1) % ALONE > MOST_LOST end
local function lost_leases(pending) return is_foreign(pending) and 0 or (pending[4] - 1) % ALONE end
local function runs_alone(pending) return not is_foreign(pending) and (pending[4] - 1) % RENEWAL >= ALONE end

-- Returns the entry's row of XPENDING if this consumer holds the entry, else false or nil.
local function held_by(consumer, stream, entry)
  local pending = redis.call('XPENDING', stream, GROUP, entry, entry, 1)[1]
  return pending and pending[2] == consumer and pending
end

-- This renews the lease too: the delivery count is never one that it was before. The number of renewals stays
-- below MOST_RENEWALS: another client may have set a count that the server takes only once.
local function give_to(consumer, stream, pending, lost, alone)
  local renewals = (math.floor((pending[4] - 1) / RENEWAL) + 1) % MOST_RENEWALS
  local deliveries = 1 + lost + (alone and ALONE or 0) + renewals * RENEWAL
  redis.call('XCLAIM', stream, GROUP, consumer, 0, pending[1], 'RETRYCOUNT', deliveries, 'JUSTID')
end

local function remove(stream, entry)
  redis.pcall('XACK', stream, GROUP, entry)
  redis.pcall('XDEL', stream, entry)
end

-- Removes an entry that is not its ticket's place: the ticket has another, has ended, or was never issued.
local function remove_leftover(stream, entry, ticket)
  if find_own(ticket, stream, entry) then remove(stream, entry) end
end

-- Returns an error if a key is of another type than this run gives it: an XADD to a string would fail.
local function wrong_type(keys)
  for _, key in ipairs(keys) do
    local found, expected = redis.call('TYPE', key).ok, KINDS[string.match(key, '([^:]*)$')] or 'stream'
    if found ~= 'none' and found ~= expected then
      local text = 'WRONGTYPE the key ' .. key .. ' is a ' .. found .. ', expected a ' .. expected
      return redis.error_reply(text)
    end
  end
end

-- Returns an error unless this is the newest incarnation of the learner.
local function fenced(fence, incarnation)
  local current = redis.call('HGET', fence, 'incarnation')
  if not current then return redis.error_reply('NOTREADY the run is not set up on this server') end
  if current ~= incarnation and (not is_number(current) or tonumber(current) < tonumber(incarnation)) then
    return redis.error_reply('NOTREADY the server lost this learner\'s claim')  -- by kill -9: claim again
  end
  if current ~= incarnation then
    return redis.error_reply('FENCED incarnation ' .. current .. ' of the learner holds the run')
  end
end

-- Returns an error where no learner has set the run up.
local function ready(fence)
  if redis.call('EXISTS', fence) == 0 then
    return redis.error_reply('NOTREADY the run is not set up on this server')
  end
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- The time is for people; the count says that the lease was renewed.
local function note_beat(fence, lease, phase)
  redis.call('HSET', fence, 'seen', now_ms(), 'lease', lease, 'phase', phase)
  count_up(fence, 'beats')
end

-- Returns an error while another learner's lease may live: it has not left, is not among the `gone`, and its
-- count of heartbeats is not the one that was seen unchanged for a lease. A lease over a day is no learner's.
local function taken(fence, holder, unchanged, gone)
  local found = redis.call('HMGET', fence, 'holder', 'incarnation', 'beats', 'lease')
  local other, beats, lease = found[1] or '', found[3] or '', is_number(found[4]) and tonumber(found[4]) or 0
  if lease == 0 or lease > DAY_MS or other == holder or beats == unchanged then return end
  for _, name in ipairs(gone) do
    if name == other then return end
  end
  return redis.error_reply(string.format(
    'TAKEN the learner %s (incarnation %s) holds run %s: its lease of %g s lives; stop it, or wait', other,
    found[2] or '?', string.match(fence, '{(.*)}'), lease / 1000))
end

-- Returns a value from a reply of XINFO.
local function value_of(facts, name)
  for i = 1, #facts, 2 do
    if facts[i] == name then return facts[i + 1] end
  end
end

-- Returns the last id that a stream's group gave out; '0-0' without the group. Others may have made groups.
local function last_delivered(stream)
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    if value_of(group, 'name') == GROUP then return value_of(group, 'last-delivered-id') end
  end
  return '0-0'
end

local function is_after(entry, other)
  local ms, sequence = string.match(entry, '(%d+)-(%d+)')
  local other_ms, other_sequence = string.match(other, '(%d+)-(%d+)')
  if ms ~= other_ms then return tonumber(ms) > tonumber(other_ms) end
  return tonumber(sequence) > tonumber(other_sequence)
end

-- Returns whether nobody holds an entry of a work stream and the group will not give it out: another client
-- acknowledged it, deleted its consumer, or moved the group's position.
local function is_orphan(stream, entry)
  if not WORK_STREAMS[string.match(stream, '([^:]*)$')] then return false end
  local pending = redis.pcall('XPENDING', stream, GROUP, entry, entry, 1)
  return not pending.err and #pending == 0 and not is_after(entry, last_delivered(stream))
end

-- Makes the groups that are missing. Returns the streams that lacked one.
local function make_groups(keys)
  local made = {}
  for _, key in ipairs(keys) do
    if WORK_STREAMS[string.match(key, '([^:]*)$')] then
      local answer = redis.pcall('XGROUP', 'CREATE', key, GROUP, '0', 'MKSTREAM')
      if not answer.err then table.insert(made, key) end
    end
  end
  return made
end

-- Returns whether a key of this run cannot be used: of another type, or a stream that has an entry with an id
-- after which the server may have none left for the next entry, or a stream whose group is past its last
-- entry: the group would not give out the next ones. The server's clock does not count: put back by two days,
-- it would delete the work of all roles.
local function is_damaged(key)
  if wrong_type({key}) then return true end
  local name = string.match(key, '([^:]*)$')
  if KINDS[name] or redis.call('EXISTS', key) == 0 then return false end
  local last = value_of(redis.call('XINFO', 'STREAM', key), 'last-generated-id')
  if tonumber(string.match(last, '^%d+')) > LAST_MS then return true end
  return WORK_STREAMS[name] and is_after(last_delivered(key), last)
end

-- Deletes the keys that cannot be used, but for the fence, which is the first. Returns them.
local function delete_damaged(keys)
  local deleted = {}
  for i = 2, #keys do
    if is_damaged(keys[i]) then
      redis.call('DEL', keys[i])
      table.insert(deleted, keys[i])
    end
  end
  return deleted
end

-- keys: fence, all other keys; args: nonce, incarnation, holder, lease_ms, the count of heartbeats that was
-- seen unchanged for the other learner's lease ('-' if none was), then holders that have certainly ended. With
-- lease_ms 0 the present learner claims again, whoever's lease is stored: a server that was killed may have
-- returned to the lease of the learner before. With -1 this learner has claimed on this very process of the
-- server, so another client wrote what differs; with a lower incarnation it may be a run of another folder.
local function claim(keys, args)
  local lease, wrong = tonumber(args[4]), wrong_type({keys[1]})
  if wrong and lease == 0 then return wrong end  -- as if the server lost the claim: the next start claims
  if wrong then redis.call('DEL', keys[1]) end
  local nonce = redis.call('HGET', keys[1], 'nonce')
  local current = redis.call('HGET', keys[1], 'incarnation')
  local is_claimed = is_number(current) and current ~= '0' and tonumber(current) < tonumber(args[2])
  if nonce and nonce ~= args[1] and (lease >= 0 or is_claimed) then
    return redis.error_reply('FOREIGN this server holds a run of this name from another folder')
  end
  local ahead = is_number(current) and tonumber(current) - tonumber(args[2]) or 0
  if ahead > 0 and ahead <= FENCE_JUMP then
    return redis.error_reply('FENCED incarnation ' .. current .. ' of the learner holds the run')
  end
  local refused = lease > 0 and taken(keys[1], args[3], args[5], {unpack(args, 6)})
  if refused then return refused end
  redis.call('HSET', keys[1], 'nonce', args[1], 'incarnation', args[2], 'holder', args[3])
  if lease > 0 then
    note_beat(keys[1], lease, '')
  elseif lease == 0 and not redis.call('HGET', keys[1], 'lease') then
    redis.call('HSET', keys[1], 'lease', 0)  -- with -1 a heartbeat will write it: 0 says that the learner left
  end
  delete_damaged(keys)
  make_groups(keys)
  return 'OK'
end

-- keys: fence; args: incarnation, lease_ms (0: the learner leaves), phase
local function beat(keys, args)
  note_beat(keys[1], args[2], args[3])
  return 1
end

-- Removes the consumers that hold nothing and have asked for nothing for that long, as those of killed processes.
-- One that lives all the same is made again when it asks for work.
local function remove_consumers(keys, idle_ms)
  for _, key in ipairs(keys) do
    local work = WORK_STREAMS[string.match(key, '([^:]*)$')]
    for _, consumer in ipairs(work and redis.call('XINFO', 'CONSUMERS', key, GROUP) or {}) do
      if value_of(consumer, 'pending') == 0 and value_of(consumer, 'idle') >= idle_ms then
        redis.call('XGROUP', 'DELCONSUMER', key, GROUP, value_of(consumer, 'name'))
      end
    end
  end
end

-- keys: fence, all other keys; args: incarnation, nonce, holder, idle time in ms after which consumers are
-- removed, then (index of a key, value) each
-- Rewrites what another client changed: the claim's nonce and holder, the values, and keys or groups that
-- cannot be used. Returns the keys that were corrected.
local function restore(keys, args)
  local corrected = delete_damaged(keys)
  local found = redis.call('HMGET', keys[1], 'nonce', 'holder')
  if found[1] ~= args[2] or found[2] ~= args[3] then
    redis.call('HSET', keys[1], 'nonce', args[2], 'holder', args[3])
    table.insert(corrected, keys[1])
  end
  for i = 5, #args, 2 do
    local key = keys[tonumber(args[i])]
    if redis.call('GET', key) ~= args[i + 1] then
      redis.call('SET', key, args[i + 1])
      table.insert(corrected, key)
    end
  end
  for _, key in ipairs(make_groups(keys)) do table.insert(corrected, key) end
  remove_consumers(keys, tonumber(args[4]))
  return corrected
end

-- Returns names and counts of a hash of counters.
local function counts_of(hash)
  local found, counts = redis.call('HGETALL', hash), {}
  for i = 1, #found, 2 do
    if is_number(found[i + 1]) then
      table.insert(counts, found[i])
      table.insert(counts, found[i + 1])
    end
  end
  return counts
end

-- keys: fence, open, ledger; args: incarnation, cursor, count
-- Returns {next cursor, {ticket, version, 1 if its entry can end} of each, the totals}. A slice of `open`, as
-- another client may have written any number of tickets there.
local function places(keys, args)
  local slice = redis.call('HSCAN', keys[2], args[2], 'COUNT', args[3])
  local tickets = {}
  for i = 1, #slice[2], 2 do
    local ticket = slice[2][i]
    local stream, entry, version = split_place(keys[2], slice[2][i + 1])
    local own = stream and find_own(ticket, stream, entry) and not is_orphan(stream, entry)
    table.insert(tickets, {ticket, version or '', own and 1 or 0})
  end
  return {slice[1], tickets, counts_of(keys[3])}
end

-- keys: fence, open, ledger, stream; args: incarnation, then (ticket, version, payload) each
-- Adds the tickets that have no entry on the server, and replaces an entry of `stream` with another payload:
-- its answer would end stale. An entry that no worker will get is replaced as well. Returns for each the
-- version of first issue.
local function issue(keys, args)
  local versions = {}
  for i = 2, #args, 3 do
    local ticket, version, payload = args[i], args[i + 1], args[i + 2]
    local place = redis.call('HGET', keys[2], ticket)
    local alive = false
    if place then
      local stream, entry, first = split_place(keys[2], place)
      version = first or version
      alive = find_own(ticket, stream, entry)
      local other = stream == keys[4] and alive and field_of(alive, 'd') ~= payload
      if alive and (other or is_orphan(stream, entry)) then
        remove(stream, entry)
        alive = false
      end
    else
      count_up(keys[3], 'issued')
    end
    if not alive then
      local entry = redis.call('XADD', keys[4], '*', 't', ticket, 'd', payload)
      redis.call('HSET', keys[2], ticket, place_of(keys[4], entry, version))
    end
    table.insert(versions, version)
  end
  return versions
end

-- Replaces the entry by a new one on dst. XADD comes first: were XACK first and XADD refused (out of
-- memory), the group would be lost.
local function move(open, src, dst, entry, ticket, version, ...)
  local moved = redis.call('XADD', dst, '*', 't', ticket, ...)
  redis.call('HSET', open, ticket, place_of(dst, moved, version))
  remove(src, entry)
end

-- keys: fence, open, src, dst; args: entry, ticket, payload
-- Moves the ticket to dst, for the first consumer that finishes, even without the lease. Returns 1, or 0
-- if the ticket was moved or ended before.
local function handoff(keys, args)
  local open, src, dst = keys[2], keys[3], keys[4]
  local entry, ticket = args[1], args[2]
  local version = version_at(open, ticket, src, entry)
  if version then
    move(open, src, dst, entry, ticket, version, 'd', args[3])
    return 1
  end
  remove_leftover(src, entry, ticket)
  return 0
end

-- keys: fence, open, src; args: consumer, entry, ticket, failures, max_attempts, partial
-- Puts the holder's entry back at the end of its stream, with field `p`: what was sampled for it so far. That is
-- `partial`, or if this is '' what the entry had. A failed attempt leaves none, as it may have caused the
-- failure. Returns the failed attempts so far, or -1 if the consumer does not hold the entry. With `failures` 1
-- this attempt counts as well; if it was the last one, the entry stays for the caller to bury.
local function put_back(keys, args)
  local open, src, consumer, entry, ticket = keys[2], keys[3], args[1], args[2], args[3]
  local pending, found = held_by(consumer, src, entry), find(src, entry)
  local version = version_at(open, ticket, src, entry)
  if not version then remove_leftover(src, entry, ticket) end
  if not (pending and found and version) then return -1 end
  local failures = tonumber(args[4])
  local lost = lost_leases(pending) + failures
  local attempts = (failed_before(found) or 0) + lost
  if failures > 0 and attempts >= tonumber(args[5]) then
    give_to(consumer, src, pending, lost, false)
  else
    local partial = args[6] ~= '' and args[6] or field_of(found, 'p')
    local kept = failures == 0 and partial and {'p', partial} or {}
    move(open, src, src, entry, ticket, version, 'd', field_of(found, 'd') or '', 'a', attempts, unpack(kept))
  end
  return attempts
end

-- keys: fence, open, src, dst, dead; args: consumer, entry, ticket, payload, tombstone, reason
-- Ends the holder's ticket as dead. Returns 0 if the consumer does not hold the entry.
local function bury(keys, args)
  local open, src, entry, ticket = keys[2], keys[3], args[2], args[3]
  local version = version_at(open, ticket, src, entry)
  if not version then remove_leftover(src, entry, ticket) end
  if not (version and held_by(args[1], src, entry)) then return 0 end
  redis.call('XADD', keys[5], 'MAXLEN', '~', DEAD_KEPT, '*', 't', ticket, 'd', args[4], 'reason', args[6])
  move(open, src, keys[4], entry, ticket, version, 'd', args[5])
  return 1
end

-- keys: fence, src; args: consumer, entry
-- Records that the holder works on nothing else, so a lease lost from now on is blamed on this ticket.
-- Returns 0 if the consumer does not hold the entry.
local function mark_alone(keys, args)
  local pending = held_by(args[1], keys[2], args[2])
  if not pending then return 0 end
  give_to(args[1], keys[2], pending, lost_leases(pending), true)
  return 1
end

-- keys: fence, src; args: consumer, entries...
-- Renews the leases. Returns for each entry 1, or 0 if the consumer does not hold it.
local function renew(keys, args)
  local owned = {}
  for i = 2, #args do
    local held = held_by(args[1], keys[2], args[i])
    if held then give_to(args[1], keys[2], held, lost_leases(held), runs_alone(held)) end
    table.insert(owned, held and 1 or 0)
  end
  return owned
end

-- keys: fence, src. Returns {entry, consumer, delivery count} of the oldest entries that are held. This writes
-- nothing, but is refused like a write: a lease that cannot be renewed must not be seen to run out.
local function leases(keys, args)
  local found = {}
  for _, pending in ipairs(redis.call('XPENDING', keys[2], GROUP, '-', '+', LOOKED_AT)) do
    table.insert(found, {pending[1], pending[2], pending[4]})
  end
  return found
end

-- Returns {entry, ticket, payload, attempts, doomed, partial}, as workers read it. `attempts` that are no number are
-- returned as they are, for `drop`.
local function taken_row(found, lost, doomed)
  local before = failed_before(found)
  local attempts = before and before + lost or field_of(found, 'a')
  local payload, partial = field_of(found, 'd'), field_of(found, 'p')
  return {found[1], field_of(found, 't'), payload, attempts, doomed and 1 or 0, partial}
end

-- keys: fence, src; args: consumer, max_attempts, server's run_id, then (entry, consumer, delivery count) each,
-- as `leases` of this process of the server returned them.
-- Takes over the entries that are still held so, and counts the attempt in the same step. Only a ticket that
-- ran alone is doomed. Returns a row of each.
local function reclaim(keys, args)
  local src, most = keys[2], tonumber(args[2])
  local taken = {}
  -- A server that was killed may be back at a count from before a renewal; a call that is sent again names
  -- the process before.
  if not string.find(redis.call('INFO', 'server'), 'run_id:' .. args[3], 1, true) then return taken end
  for i = 4, #args, 3 do
    local entry, pending = args[i], held_by(args[i + 1], src, args[i])
    local same = pending and string.format('%d', pending[4]) == args[i + 2]
    local found = same and find(src, entry)
    if same and not found then
      redis.call('XACK', src, GROUP, entry)
    elseif same then
      local before, doomed = failed_before(found) or 0, runs_alone(pending)
      local attempts = before + lost_leases(pending) + 1
      if attempts >= most and not doomed then attempts = math.max(before, most - 1, 1) end
      give_to(args[1], src, pending, attempts - before, doomed)
      table.insert(taken, taken_row(found, attempts - before, doomed))
    end
  end
  return taken
end

-- keys: fence, src; args: consumer. Returns a row of each of the oldest entries that the consumer holds: of
-- some it may not know, as the reply was lost.
local function held(keys, args)
  local rows = {}
  for _, pending in ipairs(redis.call('XPENDING', keys[2], GROUP, '-', '+', LOOKED_AT, args[1])) do
    local found = find(keys[2], pending[1])
    if found then table.insert(rows, taken_row(found, lost_leases(pending), runs_alone(pending))) end
  end
  return rows
end

-- keys: fence, stream, malformed; args: cause, entries...
-- Deletes entries that no role can read, and counts them by cause. Returns how many were there.
local function drop(keys, args)
  local dropped = 0
  for i = 2, #args do
    if find(keys[2], args[i]) then
      remove(keys[2], args[i])
      count_up(keys[3], args[1])
      dropped = dropped + 1
    end
  end
  return dropped
end

-- keys: fence, outcome stream; args: incarnation, after, count. Returns {entry, ticket, payload} of each;
-- none after the largest id, where XRANGE is an error: the stream is deleted by `restore`.
local function outcomes(keys, args)
  local found = {}
  for _, entry in ipairs(redis.pcall('XRANGE', keys[2], '(' .. args[2], '+', 'COUNT', args[3])) do
    table.insert(found, {entry[1], field_of(entry, 't'), field_of(entry, 'd')})
  end
  return found
end

-- keys: fence; args: incarnation, folder, length, holder. The incarnation is claimed in that folder by that
-- process, and its journal has that many bytes there: an older copy of the folder has not, and one that went
-- on by itself has another process's claim of this number.
local function own(keys, args)
  redis.call('HSET', keys[1], 'claimed', args[1], 'folder', args[2], 'journal', args[3], 'claimant', args[4])
  return 1
end

-- keys: fence, open, ledger, outcome stream
-- args: incarnation, length of the journal, number of tickets, (ticket, state) each, then entries of the outcome
-- stream
-- Ends the tickets on whatever stream their entries are, and deletes the named entries. Returns how many
-- tickets were open.
local function close(keys, args)
  local closed = 0
  local last = 3 + 2 * tonumber(args[3])
  redis.call('HSET', keys[1], 'journal', args[2])
  for i = 4, last, 2 do
    local ticket, state = args[i], args[i + 1]
    local place = redis.call('HGET', keys[2], ticket)
    if place then
      local stream, entry = split_place(keys[2], place)
      if find_own(ticket, stream, entry) then remove(stream, entry) end
      redis.call('HDEL', keys[2], ticket)
      count_up(keys[3], state)
      closed = closed + 1
    end
  end
  for i = last + 1, #args do redis.call('XDEL', keys[4], args[i]) end
  return closed
end

-- keys: fence, target; args: incarnation, value
local function put(keys, args)
  redis.call('SET', keys[2], args[2])
  return 1
end

-- keys: fence, ledger; args: incarnation, then (name, count) each
local function set_totals(keys, args)
  redis.call('DEL', keys[2])
  for i = 2, #args, 2 do redis.call('HSET', keys[2], args[i], args[i + 1]) end
  return 1
end

-- keys: src; args: consumer. A consumer that holds entries stays: to remove it would lose them.
local function remove_consumer(keys, args)
  if #redis.call('XPENDING', keys[1], GROUP, '-', '+', 1, args[1]) > 0 then return 0 end
  return redis.call('XGROUP', 'DELCONSUMER', keys[1], GROUP, args[1]) + 1
end

-- keys: open, ledger, work streams...; args: cursor, count
-- Returns the next cursor, the totals, how many names are in `open`, how many of a slice of them no learner
-- wrote, and of the others place, attempts, holder and idle time.
local function audit(keys, args)
  local slice, tickets, strange = redis.call('HSCAN', keys[1], args[1], 'COUNT', args[2]), {}, 0
  for i = 1, #slice[2], 2 do
    local ticket, stream, entry, version = slice[2][i], split_place(keys[1], slice[2][i + 1])
    if stream and is_ticket(ticket) then
      local held = WORK_STREAMS[string.match(stream, '([^:]*)$')] and
        redis.call('XPENDING', stream, GROUP, entry, entry, 1)[1]
      local found = find_own(ticket, stream, entry)
      local attempts = (found and failed_before(found) or 0) + (held and lost_leases(held) or 0)
      local holder, idle_ms = held and held[2] or '', held and held[3] or 0
      table.insert(tickets, {ticket, stream, entry, version, attempts, holder, idle_ms, found and 1 or 0})
    else
      strange = strange + 1
    end
  end
  return {slice[1], counts_of(keys[2]), redis.call('HLEN', keys[1]), strange, tickets}
end

local MENDERS = {claim = true, restore = true}  -- these get keys of another type, and delete them

-- `check` is called with the fence and the first argument before the function; its error ends the call.
local function register(name, callback, flags, check)
  local function checked(keys, args)
    local checked_keys = MENDERS[name] and {keys[1]} or keys
    local refused = name ~= 'claim' and wrong_type(checked_keys) or check and check(keys[1], args[1])
    return refused or callback(keys, args)
  end
  redis.register_function{function_name = 'penstock_4_' .. name, callback = checked, flags = flags}
end

register('claim', claim, {})
register('beat', beat, {'allow-oom'}, fenced)
register('issue', issue, {}, fenced)
register('restore', restore, {'allow-oom'}, fenced)
register('places', places, {'no-writes'}, fenced)
register('outcomes', outcomes, {'no-writes'}, fenced)
register('close', close, {'allow-oom'}, fenced)
register('own', own, {'allow-oom'}, fenced)
register('put', put, {}, fenced)
register('set_totals', set_totals, {}, fenced)
register('handoff', handoff, {}, ready)
register('bury', bury, {}, ready)
register('mark_alone', mark_alone, {'allow-oom'}, ready)
register('put_back', put_back, {}, ready)
register('renew', renew, {'allow-oom'}, ready)
register('leases', leases, {'allow-oom'}, ready)
register('reclaim', reclaim, {'allow-oom'}, ready)
register('held', held, {'no-writes'}, ready)
register('drop', drop, {'allow-oom'}, ready)
register('remove_consumer', remove_consumer, {'allow-oom'})
register('audit', audit, {'no-writes'})
