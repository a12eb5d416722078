        .text
probed:
        stp     x29, x30, [sp, #-16]!
        mov     x29, sp
        mov     w0, #0
        ldp     x29, x30, [sp], #16
        ret
        .balign 16

call:
        stp     x29, x30, [sp, #-80]!
        mov     x29, sp
        stp     x19, x20, [sp, #16]
        stp     x21, x22, [sp, #32]
        stp     x23, x24, [sp, #48]
        str     x25, [sp, #64]
        mov     x19, x0
        mov     x20, x1
        mov     x21, x2
        mov     x22, x3
        mov     x23, x4
        mov     x24, x5
        mov     x25, #1
1:      mov     x9, x23
        mov     x10, x24
        b       3f
2:      ldrb    w11, [x9]
        add     w11, w11, #1
        strb    w11, [x9], #64
3:      subs    x10, x10, #64
        b.ge    2b
        mov     x0, #0
        mov     x1, #0
        mov     x2, x25
        mov     w3, #7
        mov     w4, #0
        mov     x5, #1
        mov     x6, #0
        blr     x19
        add     x25, x25, x22
        mov     x9, x19
        mov     x19, x20
        mov     x20, x9
        subs    x21, x21, #1
        b.ne    1b
        ldp     x19, x20, [sp, #16]
        ldp     x21, x22, [sp, #32]
        ldp     x23, x24, [sp, #48]
        ldr     x25, [sp, #64]
        ldp     x29, x30, [sp], #80
        ret
        .balign 16

pass:
        sub     sp, sp, #16
        mov     x9, x0
        mov     x10, x1
        mov     x11, x2
        mov     x12, x3
        mov     x13, x4
1:      mov     x8, x9
        mov     x0, x10
        mov     x1, sp
        mov     x2, #1
        svc     #0
        cmp     x0, #1
        b.ne    2f
        mov     x8, x11
        mov     x0, x12
        mov     x1, sp
        mov     x2, #1
        svc     #0
        cmp     x0, #1
        b.ne    2f
        subs    x13, x13, #1
        b.ne    1b
2:      mov     x0, x13
        add     sp, sp, #16
        ret
