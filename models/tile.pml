/* One tile, its two buffers and the threads that touch them, small enough to try every interleaving.
 *
 * The caller brings gradients, discards them and steps; the stream copies; the
 * worker adds and steps ahead. What a buffer holds is reduced to a number: the sum
 * over windows of gradients times scale. So a gradient that is lost, counted
 * twice, scaled by a bet that did not hold, or left over from another window
 * shows as another number.
 *
 *   no lost gradient        what is published is the old value plus this window's gradients, truly scaled
 *   no stale publish        the parameter is the tile's buffer after each step
 *   no buffer in two hands    each buffer is the tile's, the spare's, a pass's or the pool's
 *   every window ends       no end state but the last line of the caller, and no cycle without progress
 *
 * BUG=1.. takes one rule away; scripts/check_model.sh sees that each is missed.
 * The code: src/longshore/tiles/{tile_state,tile,store,speculation,stepping}.py.
 */
#ifndef BUG
#define BUG 0
#endif
#define WINDOWS 3
#define MOST 2 /* gradients a window */

mtype = { EMPTY, FILLING, READY, STEPPING, STEPPED, COMMITTING, COMMITTED };
mtype = { ADD, PASS };
mtype = { POOL, TILE, SPARE, IN_PASS };

mtype state = EMPTY;
byte version, arrivals, expected;
byte buffer[2];
mtype hand[2];
byte mine = 0, spare;

/* On the host: what of the window has been copied and added. */
byte sum;
bool copied;

/* The bet that is out: from its beginning to the end of the window. */
bool bet, bet_open;
byte bet_version, bet_buffer;

byte truth, parameter;

chan stream = [1] of { bit };
chan jobs = [6] of { mtype };
byte pending; /* jobs that were submitted and have not run */

active proctype CopyStream() {
    bit ignored;
end: do
    :: stream ? ignored -> atomic { sum = 1; copied = true }
    od
}

active proctype Worker() {
    byte read;
end: do
    :: jobs ? ADD ->
        copied; /* the first one is in its slot */
        atomic { sum++; pending-- }
    :: jobs ? PASS ->
        if
        :: bet_version != version -> skip /* nobody wants it any more */
        :: else ->
#if BUG != 1
            copied;
#endif
            read = buffer[mine] + sum;
            buffer[bet_buffer] = read
        fi;
        pending--
    od
}

inline submit(job) { atomic { pending++; jobs ! job } }

inline give_back(which) { assert(hand[which] != POOL); hand[which] = POOL }

inline drop() {
    if
    :: state == STEPPED -> assert(hand[spare] == SPARE); give_back(spare)
    :: else -> skip
    fi
}

inline consider() {
    if
    :: expected > 0 && arrivals >= expected && state == FILLING ->
        state = READY;
        if
        :: !bet && hand[1 - mine] == POOL ->
            bet = true; bet_open = true; bet_version = version; bet_buffer = 1 - mine;
            hand[bet_buffer] = IN_PASS;
            state = STEPPING;
            submit(PASS)
        :: else -> skip /* no spare: it waits */
        fi
    :: else -> skip
    fi
}

inline arrive() {
    assert(state == EMPTY || state == FILLING || state == READY || state == STEPPING || state == STEPPED);
    drop();
    arrivals++;
#if BUG != 2
    version++;
#endif
    state = FILLING;
    if
    :: arrivals == 1 -> stream ! 0
    :: else -> submit(ADD)
    fi;
    consider()
}

inline drain() {
#if BUG != 3
    (pending == 0 && (arrivals == 0 || copied))
#else
    skip
#endif
}

inline harvest() {
    if
    :: bet_open ->
        bet_open = false;
        if
        :: bet_version == version ->
            assert(state == STEPPING);
            state = STEPPED; spare = bet_buffer; hand[spare] = SPARE
        :: else ->
#if BUG != 4
            give_back(bet_buffer)
#else
            skip
#endif
        fi
    :: else -> skip
    fi
}

inline end_window() {
    state = EMPTY;
    arrivals = 0; sum = 0;
#if BUG != 5
    copied = false; /* or the next window's copy is not waited for */
#endif
    bet = false;
    version++
}

inline discard() {
    drain();
    harvest();
    drop();
    end_window()
}

inline step(scale) {
    drain();
    harvest();
    if
    :: state == STEPPED && (scale == 1 || BUG == 6) -> /* as assumed: the spare is the buffer */
        hand[mine] = POOL; mine = spare; hand[mine] = TILE;
        state = COMMITTED
    :: else ->
        if
        :: state == STEPPED -> give_back(spare); state = READY
        :: else -> skip
        fi;
        assert(state == FILLING || state == READY);
        state = COMMITTING;
        buffer[mine] = buffer[mine] + sum * scale;
        state = COMMITTED
    fi;
    assert(buffer[mine] == truth + arrivals * scale);
    truth = buffer[mine];
    parameter = buffer[mine];
    expected = arrivals;
    end_window()
}

inline check_hands() {
    assert(parameter == buffer[mine] && hand[mine] == TILE);
    assert(hand[1 - mine] == POOL);
    assert(pending == 0 && !bet_open)
}

active proctype Caller() {
    byte windows;
    hand[0] = TILE; hand[1] = POOL;
    do
    :: windows < WINDOWS ->
        do
        :: arrivals < MOST -> arrive()
        :: arrivals > 0 -> discard(); break /* the window ends without a step */
        :: arrivals > 0 -> step(1); break
        :: arrivals > 0 -> step(2); break
        od;
        check_hands();
progress: windows++
    :: else -> break
    od;
    assert(state == EMPTY)
}
