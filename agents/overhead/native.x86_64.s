# What is measured, and what calls it. Regenerate machine_code.py's bytes from it after a change (its docstring says how).
        .text
# A function as compilers begin and end them: the kernel emulates a push.
probed:
        push    %rbp
        mov     %rsp, %rbp
        xor     %eax, %eax
        pop     %rbp
        ret
        .balign 16, 0xcc

# call(first, second, n, step, buffer, bytes): n times first() and second(), each as ncclAllReduce is called, with a count that
# grows by step; before each, one byte of every 64 of the buffer is written.
call:
        push    %rbp
        mov     %rsp, %rbp
        push    %rbx
        push    %r12
        push    %r13
        push    %r14
        push    %r15
        sub     $24, %rsp
        movq    $0, (%rsp)              # the seventh argument: stream
        mov     %r8, 8(%rsp)
        mov     %r9, 16(%rsp)
        mov     %rdi, %r12
        mov     %rsi, %r13
        mov     %rdx, %rbx
        mov     %rcx, %r15
        mov     $1, %r14d
1:      mov     8(%rsp), %rax
        mov     16(%rsp), %rcx
        jmp     3f
2:      incb    (%rax)
        add     $64, %rax
3:      sub     $64, %rcx
        jge     2b
        xor     %edi, %edi
        xor     %esi, %esi
        mov     %r14, %rdx
        mov     $7, %ecx                # ncclFloat32
        xor     %r8d, %r8d              # ncclSum
        mov     $1, %r9d                # communicator
        call    *%r12
        add     %r15, %r14
        xchg    %r12, %r13
        dec     %rbx
        jnz     1b
        add     $24, %rsp
        pop     %r15
        pop     %r14
        pop     %r13
        pop     %r12
        pop     %rbx
        pop     %rbp
        ret
        .balign 16, 0xcc

# pass(first, first_fd, second, second_fd, n): n times two system calls, each with a descriptor and one byte; what is left of n.
pass:
        push    %rbp
        mov     %rsp, %rbp
        push    %rbx
        push    %r12
        push    %r13
        push    %r14
        push    %r15
        sub     $8, %rsp
        mov     %rdi, %r12
        mov     %rsi, %r13
        mov     %rdx, %r14
        mov     %rcx, %r15
        mov     %r8, %rbx
1:      mov     %r12, %rax
        mov     %r13, %rdi
        mov     %rsp, %rsi
        mov     $1, %edx
        syscall
        cmp     $1, %rax
        jne     2f
        mov     %r14, %rax
        mov     %r15, %rdi
        mov     %rsp, %rsi
        mov     $1, %edx
        syscall
        cmp     $1, %rax
        jne     2f
        dec     %rbx
        jnz     1b
2:      mov     %rbx, %rax
        add     $8, %rsp
        pop     %r15
        pop     %r14
        pop     %r13
        pop     %r12
        pop     %rbx
        pop     %rbp
        ret
