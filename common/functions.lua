#!lua name=penstock_1
-- The protocol's server-side functions. Each moves work or state in one atomic step, and each may be
-- called again after a lost reply: the second call finds nothing left to do.
--
-- `open` maps a ticket to "stream|entry|version": where its one entry lies, and the version it was
-- first issued at. A ticket that is not in `open` has ended or was never issued.

local GROUP = 'workers'

local function field_of(entry, name)
  for i = 1, #entry[2], 2 do
    if entry[2][i] == name then return entry[2][i + 1] end
  end
  return false
end

local function split_place(place)
  return string.match(place, '^(.*)|(.*)|(.*)$')
end

local function place_of(stream, entry, version)
  return stream .. '|' .. entry .. '|' .. version
end

local function exists(stream, entry)
  return #redis.call('XRANGE', stream, entry, entry) == 1
end

local function is_pending(stream, entry)
  return #redis.call('XPENDING', stream, GROUP, entry, entry, 1) == 1
end

local function remove(stream, entry)
  redis.pcall('XACK', stream, GROUP, entry)
  redis.call('XDEL', stream, entry)
end

-- Only the newest incarnation of the learner may write.
local function fenced(fence, incarnation)
  local current = redis.call('HGET', fence, 'incarnation')
  if not current then return redis.error_reply('NOTREADY the run is not set up on this server') end
  if tonumber(current) < tonumber(incarnation) then
    return redis.error_reply('NOTREADY the server lost this learner\'s claim')  -- by kill -9: claim again
  end
  if current ~= incarnation then
    return redis.error_reply('FENCED incarnation ' .. current .. ' of the learner holds the run')
  end
end

local function ready(fence)
  if redis.call('EXISTS', fence) == 0 then
    return redis.error_reply('NOTREADY the run is not set up on this server')
  end
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- The refusal while another learner's lease lives, unless that one is among the `gone`.
local function taken(fence, holder, gone)
  local found = redis.call('HMGET', fence, 'holder', 'incarnation', 'seen', 'lease')
  local other, lease = found[1], tonumber(found[4] or 0)
  if lease == 0 or other == holder then return end
  for _, name in ipairs(gone) do
    if name == other then return end
  end
  local idle = now_ms() - tonumber(found[3])
  if idle >= lease then return end
  return redis.error_reply(string.format(
    'TAKEN the learner %s (incarnation %s) holds run %s, last seen %.1f s ago; stop it, or wait until its '
    .. 'lease of %g s has run out', other, found[2], string.match(fence, '{(.*)}'), idle / 1000, lease / 1000))
end

-- keys: fence, work streams...; args: nonce, incarnation, holder, lease_ms, then holders that have certainly
-- ended. With lease_ms 0 a learner claims again what it had: by kill -9 the server may have gone back to the
-- lease of the one before.
local function claim(keys, args)
  local nonce = redis.call('HGET', keys[1], 'nonce')
  if nonce and nonce ~= args[1] then
    return redis.error_reply('FOREIGN this server holds a run of this name from another folder')
  end
  local current = redis.call('HGET', keys[1], 'incarnation')
  if current and tonumber(current) > tonumber(args[2]) then
    return redis.error_reply('FENCED incarnation ' .. current .. ' of the learner holds the run')
  end
  local lease = tonumber(args[4])
  local refused = lease > 0 and taken(keys[1], args[3], {unpack(args, 5)})
  if refused then return refused end
  redis.call('HSET', keys[1], 'nonce', args[1], 'incarnation', args[2], 'holder', args[3])
  if lease > 0 then redis.call('HSET', keys[1], 'seen', now_ms(), 'lease', lease, 'phase', '') end
  for i = 2, #keys do
    redis.pcall('XGROUP', 'CREATE', keys[i], GROUP, '0', 'MKSTREAM')
  end
  return 'OK'
end

-- keys: fence; args: incarnation, lease_ms (0: the learner leaves), phase
local function beat(keys, args)
  local refused = fenced(keys[1], args[1])
  if refused then return refused end
  redis.call('HSET', keys[1], 'seen', now_ms(), 'lease', args[2], 'phase', args[3])
  return 1
end

-- keys: fence, open, ledger, stream; args: incarnation, then (ticket, version, payload) each
-- Returns for each ticket the version it was first issued at.
local function issue(keys, args)
  local refused = fenced(keys[1], args[1])
  if refused then return refused end
  local versions = {}
  for i = 2, #args, 3 do
    local ticket, version, payload = args[i], args[i + 1], args[i + 2]
    local place = redis.call('HGET', keys[2], ticket)
    local alive = false
    if place then
      local stream, entry, first = split_place(place)
      version = first
      alive = exists(stream, entry)
    else
      redis.call('HINCRBY', keys[3], 'issued', 1)
    end
    if not alive then
      local entry = redis.call('XADD', keys[4], '*', 't', ticket, 'd', payload)
      redis.call('HSET', keys[2], ticket, place_of(keys[4], entry, version))
    end
    table.insert(versions, version)
  end
  return versions
end

-- XADD comes first: were XACK first and XADD refused (out of memory), the group would be lost.
local function move(keys, entry, ticket, payload)
  local open, src, dst = keys[2], keys[3], keys[4]
  if not is_pending(src, entry) then return 0 end
  local place = redis.call('HGET', open, ticket)
  local stream, current, version = split_place(place or '')
  if stream ~= src or current ~= entry then
    remove(src, entry)
    return 0
  end
  local moved = redis.call('XADD', dst, '*', 't', ticket, 'd', payload)
  redis.call('HSET', open, ticket, place_of(dst, moved, version))
  remove(src, entry)
  return 1
end

-- keys: fence, open, src, dst, attempts, alone; args: entry, ticket, payload
-- The first to finish wins. Attempts count within a stage, so they end with it; giving work back (dst is
-- src) keeps them.
local function handoff(keys, args)
  local refused = ready(keys[1])
  if refused then return refused end
  local moved = move(keys, args[1], args[2], args[3])
  if moved == 1 and keys[3] ~= keys[4] then
    redis.call('HDEL', keys[5], args[2])
    redis.call('SREM', keys[6], args[2])
  end
  return moved
end

-- keys: fence, open, src, dst, dead; args: entry, ticket, tombstone, reason
local function bury(keys, args)
  local refused = ready(keys[1])
  if refused then return refused end
  local found = redis.call('XRANGE', keys[3], args[1], args[1])
  local moved = move(keys, args[1], args[2], args[3])
  if moved == 1 then
    redis.call('XADD', keys[5], '*', 't', args[2], 'd', field_of(found[1], 'd'), 'reason', args[4])
  end
  return moved
end

-- keys: fence, open, attempts, src; args: entry, ticket, max_attempts
-- Counts an explicit failure and puts the entry back at the end. Returns the attempts counted so far;
-- at max_attempts the entry stays, for the caller to bury; -1 if the entry is not the caller's any more.
local function fail(keys, args)
  local refused = ready(keys[1])
  if refused then return refused end
  local entry, ticket = args[1], args[2]
  local found = redis.call('XRANGE', keys[4], entry, entry)
  if #found == 0 or not is_pending(keys[4], entry) then return -1 end
  local attempts = redis.call('HINCRBY', keys[3], ticket, 1)
  if attempts >= tonumber(args[3]) then return attempts end
  move({keys[1], keys[2], keys[4], keys[4]}, entry, ticket, field_of(found[1], 'd'))
  return attempts
end

-- keys: fence, src; args: consumer, entries... Returns 1 for each entry the consumer still owns.
local function renew(keys, args)
  local refused = ready(keys[1])
  if refused then return refused end
  local owned = {}
  for i = 2, #args do
    local pending = redis.call('XPENDING', keys[2], GROUP, args[i], args[i], 1)
    if #pending == 1 and pending[1][2] == args[1] then
      redis.call('XCLAIM', keys[2], GROUP, args[1], 0, args[i], 'JUSTID')
      table.insert(owned, 1)
    else
      table.insert(owned, 0)
    end
  end
  return owned
end

-- keys: fence, attempts, alone, src; args: consumer, lease_ms, count, max_attempts, server_up_ms
-- Takes over entries whose lease ran out, and counts the attempt in the same step. Only a ticket that
-- was working alone when its lease ran out is doomed. Returns {entry, ticket, payload, attempts, doomed}.
local function reclaim(keys, args)
  local refused = ready(keys[1])
  if refused then return refused end
  local lease, most = tonumber(args[2]), tonumber(args[4])
  local taken = {}
  if tonumber(args[5]) < lease then return taken end
  local late = redis.call('XPENDING', keys[4], GROUP, 'IDLE', lease, '-', '+', args[3])
  for _, pending in ipairs(late) do
    local found = redis.call('XRANGE', keys[4], pending[1], pending[1])
    if #found == 0 then
      redis.call('XACK', keys[4], GROUP, pending[1])
    else
      redis.call('XCLAIM', keys[4], GROUP, args[1], 0, pending[1], 'JUSTID')
      local ticket = field_of(found[1], 't')
      local doomed = redis.call('SISMEMBER', keys[3], ticket)
      local attempts = redis.call('HINCRBY', keys[2], ticket, 1)
      if attempts >= most and doomed == 0 then
        attempts = math.max(most - 1, 1)
        redis.call('HSET', keys[2], ticket, attempts)
      end
      table.insert(taken, {pending[1], ticket, field_of(found[1], 'd'), attempts, doomed})
    end
  end
  return taken
end

-- keys: fence, outcome stream; args: incarnation, after, count
local function outcomes(keys, args)
  local refused = fenced(keys[1], args[1])
  if refused then return refused end
  local found = {}
  for _, entry in ipairs(redis.call('XRANGE', keys[2], '(' .. args[2], '+', 'COUNT', args[3])) do
    table.insert(found, {entry[1], field_of(entry, 't'), field_of(entry, 'd')})
  end
  return found
end

-- keys: fence, open, attempts, alone, ledger, outcome stream
-- args: incarnation, number of tickets, (ticket, state) each, then entries of the outcome stream
-- Ends tickets wherever their entry lies, and deletes the entries that brought them.
local function close(keys, args)
  local refused = fenced(keys[1], args[1])
  if refused then return refused end
  local closed = 0
  local last = 2 + 2 * tonumber(args[2])
  for i = 3, last, 2 do
    local ticket, state = args[i], args[i + 1]
    local place = redis.call('HGET', keys[2], ticket)
    if place then
      local stream, entry = split_place(place)
      remove(stream, entry)
      redis.call('HDEL', keys[2], ticket)
      redis.call('HINCRBY', keys[5], state, 1)
      closed = closed + 1
    end
    redis.call('HDEL', keys[3], ticket)
    redis.call('SREM', keys[4], ticket)
  end
  for i = last + 1, #args do
    redis.call('XDEL', keys[6], args[i])
  end
  return closed
end

-- keys: fence, target; args: incarnation, value
local function put(keys, args)
  local refused = fenced(keys[1], args[1])
  if refused then return refused end
  redis.call('SET', keys[2], args[2])
  return 1
end

-- keys: fence, ledger; args: incarnation, then (name, count) each
local function set_totals(keys, args)
  local refused = fenced(keys[1], args[1])
  if refused then return refused end
  redis.call('DEL', keys[2])
  for i = 2, #args, 2 do
    redis.call('HSET', keys[2], args[i], args[i + 1])
  end
  return 1
end

-- keys: src; args: consumer. A consumer that still owns work stays: removing it would lose the work.
local function remove_consumer(keys, args)
  if #redis.call('XPENDING', keys[1], GROUP, '-', '+', 1, args[1]) > 0 then return 0 end
  return redis.call('XGROUP', 'DELCONSUMER', keys[1], GROUP, args[1]) + 1
end

-- keys: open, ledger, attempts, work streams...
-- One instant: the totals, and for each open ticket its place, attempts, holder and idle time.
local function audit(keys, args)
  local holders = {}
  for i = 4, #keys do
    if redis.call('EXISTS', keys[i]) == 1 then
      for _, pending in ipairs(redis.call('XPENDING', keys[i], GROUP, '-', '+', 1000000)) do
        holders[keys[i] .. '|' .. pending[1]] = {pending[2], pending[3]}
      end
    end
  end
  local tickets = {}
  local open = redis.call('HGETALL', keys[1])
  for i = 1, #open, 2 do
    local stream, entry, version = split_place(open[i + 1])
    local holder = holders[stream .. '|' .. entry] or {'', 0}
    local there = exists(stream, entry) and 1 or 0
    local attempts = redis.call('HGET', keys[3], open[i]) or '0'
    table.insert(tickets, {open[i], stream, entry, version, attempts, holder[1], holder[2], there})
  end
  return {redis.call('HGETALL', keys[2]), tickets}
end

local function register(name, callback, flags)
  redis.register_function{function_name = 'penstock_1_' .. name, callback = callback, flags = flags}
end

register('claim', claim, {})
register('beat', beat, {'allow-oom'})
register('issue', issue, {})
register('handoff', handoff, {})
register('bury', bury, {})
register('fail', fail, {})
register('renew', renew, {'allow-oom'})
register('reclaim', reclaim, {'allow-oom'})
register('outcomes', outcomes, {'no-writes'})
register('close', close, {'allow-oom'})
register('put', put, {})
register('set_totals', set_totals, {})
register('remove_consumer', remove_consumer, {'allow-oom'})
register('audit', audit, {'no-writes'})
